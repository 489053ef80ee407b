//! Dumps of the flight record in PyTorch's format: a pickle, which PyTorch's analyzer
//! (`torch.distributed.flight_recorder.fr_trace`) reads, or JSON for people and other tools.
//!
//! Operations that must match between ranks form a separate *process group*: the collectives of a
//! communicator; the transfers from one rank to one other rank (the analyzer expects every rank of
//! a group in every entry of it); and the same for replays of graphs, which are counted when they
//! run instead of when they are issued.
//!
//! Limits: every entry has the communicator's timeout, even if the call had another one. Once the
//! ring has overflowed, the analyzer aligns ranks by the numbers of operations, which differ
//! between ranks with different numbers of sends and receives.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::{env, fs, io, process};

use fusewire_device::DType;
use fusewire_device::call::Operation;
use serde_json::{Map, Value, json};

use super::{FlightRecord, RecordState};
use crate::options::flag;

/// Version of the format.
const VERSION: &str = "2.10";

/// Number of failed communicators whose records the process keeps, so that the file of a rank
/// contains all of them.
const KEPT: usize = 16;

/// Encoding of a dump. PyTorch's two encodings differ in absent times and in the numbers of a
/// status.
#[derive(Clone, Copy, PartialEq)]
enum DumpFormat {
    Json,
    Pickle,
}

/// Part of a dump that describes one communicator.
#[derive(Clone, Debug)]
pub(crate) struct CommDump {
    /// Name of the communicator.
    pub(crate) name: String,
    /// Name of the backend.
    pub(crate) backend: String,
    /// Version of the backend.
    pub(crate) version: String,
    /// Ranks of the communicator, in the numbering of the world.
    pub(crate) world: Vec<u32>,
    /// Index of this rank in `world`.
    pub(crate) rank: u32,
    /// Timeout of a wait, in milliseconds.
    pub(crate) timeout_ms: u64,
    /// Reason of the communicator's failure, if it has failed.
    pub(crate) failure: Option<String>,
    /// Recorded operations.
    pub(crate) records: Vec<FlightRecord>,
}

/// A process group of the dump.
struct Group {
    name: String,
    description: String,
    /// Ranks of the group, in the numbering of the world.
    ranks: Vec<u32>,
}

impl CommDump {
    /// Returns the dump as JSON text.
    pub(crate) fn json(&self) -> String {
        document(&[self], DumpFormat::Json).to_string()
    }

    /// Returns the dump as JSON text, with only the operations that have not completed.
    pub(crate) fn active_json(&self) -> String {
        let mut document = document(&[self], DumpFormat::Json);
        if let Some(entries) = document["entries"].as_array_mut() {
            entries.retain(|entry| entry["state"] != "completed");
        }
        document.to_string()
    }

    /// Writes the dump to `path`, as a pickle.
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        replace(path, &pickle(&[self])?)
    }

    /// Writes the dump to the file that the environment names, together with the dumps that other
    /// failed communicators of this process wrote to it. Returns the path, or `None` if the
    /// environment names none.
    pub(crate) fn write_by_environment(self) -> io::Result<Option<PathBuf>> {
        static WRITTEN: Mutex<Vec<(PathBuf, CommDump)>> = Mutex::new(Vec::new());
        let Some(path) = path_of_environment(self.world_rank()) else {
            return Ok(None);
        };
        let mut written = WRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
        written.retain(|(at, part)| *at != path || part.name != self.name);
        if written.len() >= KEPT {
            written.remove(0);
        }
        written.push((path.clone(), self));
        let parts: Vec<_> = written
            .iter()
            .filter(|(at, _)| *at == path)
            .map(|(_, part)| part)
            .collect();
        replace(&path, &pickle(&parts)?)?;
        Ok(Some(path))
    }

    fn world_rank(&self) -> u32 {
        self.world
            .get(self.rank as usize)
            .copied()
            .unwrap_or(self.rank)
    }

    /// Returns the process group of a record.
    fn group(&self, record: &FlightRecord) -> Group {
        let (mut name, mut description) = (self.name.clone(), self.backend.clone());
        if record.is_replay {
            name += ".replay";
            description += ", replays";
        }
        let Some((from, to)) = self.transfer(record) else {
            return Group {
                name,
                description,
                ranks: self.world.clone(),
            };
        };
        let world = |rank: u32| self.world.get(rank as usize).copied().unwrap_or(rank);
        let mut ranks = vec![world(from), world(to)];
        ranks.sort_unstable();
        ranks.dedup();
        Group {
            name: format!("{name}.{from}to{to}"),
            description: format!("{description}, rank {from} to {to}"),
            ranks,
        }
    }

    /// Returns the sender and the receiver of a send or receive.
    fn transfer(&self, record: &FlightRecord) -> Option<(u32, u32)> {
        let peer = record.peer?;
        match record.activity.operation {
            Operation::Send => Some((self.rank, peer)),
            Operation::Recv => Some((peer, self.rank)),
            _ => None,
        }
    }

    fn entry(&self, pg_id: usize, record: &FlightRecord, form: DumpFormat) -> Value {
        let activity = &record.activity;
        let group = self.group(record);
        let is_p2p = self.transfer(record).is_some();
        let (input, output) = sizes(record);
        let dtype = activity
            .dtype
            .filter(|_| activity.operation != Operation::Barrier)
            .map(type_name);
        let types = |sizes: &Value| match dtype {
            Some(name) if !sizes.as_array().is_some_and(Vec::is_empty) => json!([name]),
            _ => json!([]),
        };
        let ended_well = record.state == RecordState::Completed;
        let state = match record.state {
            RecordState::Completed => "completed",
            RecordState::Failed | RecordState::Started if record.started_ns.is_some() => "started",
            _ => "scheduled",
        };
        let time = |at: Option<u64>| match (at, form) {
            (Some(at), _) => json!(at),
            (None, DumpFormat::Json) => json!(0),
            (None, DumpFormat::Pickle) => Value::Null,
        };
        let mut entry = json!({
            "frames": [],
            "record_id": record.id - 1,
            "pg_id": pg_id,
            "process_group": [group.name, group.description],
            "collective_seq_id": record.sequence,
            "p2p_seq_id": if is_p2p { record.sequence } else { 0 },
            "op_id": record.id,
            "profiling_name": format!("nccl:{}", self.profiling_name(record, &group)),
            "time_created_ns": record.created_ns,
            "input_dtypes": types(&input),
            "input_sizes": input,
            "output_dtypes": types(&output),
            "output_sizes": output,
            "state": state,
            "time_discovered_started_ns": time(record.started_ns),
            "time_discovered_completed_ns": time(record.ended_ns.filter(|_| ended_well)),
            "retired": ended_well,
            "timeout_ms": self.timeout_ms,
            "is_p2p": is_p2p,
            "fusewire": {
                "operation": activity.name(),
                "reduction": activity.reduction.map(|code| code.name()),
                "peer": record.peer,
                "input_count": record.input_count,
                "output_count": record.output_count,
                "failed": record.state == RecordState::Failed,
                "is_replay": record.is_replay,
            },
        });
        if let (Some(started), Some(ended), true) = (record.started_ns, record.ended_ns, ended_well)
        {
            entry["duration_ms"] = json!(ended.saturating_sub(started) as f64 * 1e-6);
        }
        entry
    }

    /// Returns a name that the analyzer knows. Ranks of a transfer are indices in its group.
    fn profiling_name(&self, record: &FlightRecord, group: &Group) -> String {
        let name = match record.activity.operation {
            Operation::Send | Operation::Recv => {
                let position = |rank: u32| {
                    let world = self.world.get(rank as usize).copied().unwrap_or(rank);
                    group.ranks.iter().position(|of| *of == world).unwrap_or(0)
                };
                let (from, to) = self.transfer(record).unwrap_or_default();
                return if record.activity.operation == Operation::Send {
                    format!("send {}->{}", position(from), position(to))
                } else {
                    format!("recv {}<-{}", position(to), position(from))
                };
            }
            operation @ (Operation::AllReduce
            | Operation::ReduceScatter
            | Operation::AllGather
            | Operation::Broadcast
            | Operation::Reduce
            | Operation::Scatter
            | Operation::Gather
            | Operation::AllToAll) => operation.name(),
            Operation::ReduceScatterOnArrival => "reduce_scatter",
            Operation::AllGatherWithFlags => "all_gather",
            // PyTorch's name for an all_gather with different counts. Older analyzers do not know
            // `all_gather_v`.
            Operation::AllGatherV => "ALLGATHER_coalesced",
            Operation::AllToAllV => "all_to_all",
            Operation::Barrier => "all_reduce_barrier",
            // The analyzer knows neither fused operations nor user kernels. These names match only
            // the same kind of operation.
            Operation::AllReduceNorm => "allreduce_coalesced",
            Operation::ReduceScatterNorm => "reduce_scatter_tensor_coalesced",
            Operation::VocabParallel => "all_gather_into_tensor_coalesced",
            // The analyzer knows no one-sided operations, and a batch is one entry for all its
            // transfers.
            Operation::Batch
            | Operation::Put
            | Operation::Get
            | Operation::Signal
            | Operation::WaitSignal
            | Operation::User
            | Operation::None => "coalesced",
        };
        name.to_owned()
    }

    /// Returns the sequence numbers of the last collectives that were issued, have started, and
    /// have ended; -1 if there is none.
    fn status(&self, form: DumpFormat) -> Value {
        let last = |wanted: &dyn Fn(&FlightRecord) -> bool| {
            let last = self
                .records
                .iter()
                .filter(|record| !record.is_replay && self.transfer(record).is_none())
                .filter(|record| wanted(record))
                .map(|record| record.sequence as i64)
                .max()
                .unwrap_or(-1);
            match form {
                DumpFormat::Json => json!(last.to_string()),
                DumpFormat::Pickle => json!(last),
            }
        };
        json!({
            "last_enqueued_collective": last(&|_| true),
            "last_started_collective": last(&|record| record.started_ns.is_some()),
            "last_completed_collective": last(&|record| record.state == RecordState::Completed),
        })
    }
}

/// Returns the sizes of input and output for the analyzer's comparison: equal on all ranks if the
/// operation requires equal sizes, and `[[]]`, which the analyzer ignores, if counts differ by
/// rank.
fn sizes(record: &FlightRecord) -> (Value, Value) {
    let (input, output) = (record.input_count, record.output_count);
    let both = input.max(output);
    match record.activity.operation {
        Operation::Broadcast | Operation::Reduce => (json!([[both]]), json!([[both]])),
        Operation::Send => (json!([[input]]), json!([])),
        Operation::Recv => (json!([]), json!([[output]])),
        Operation::AllGatherV => (json!([[]]), json!([[output]])),
        Operation::AllToAllV | Operation::Barrier => (json!([[]]), json!([[]])),
        _ => (json!([[input]]), json!([[output]])),
    }
}

/// Returns the name that PyTorch prints for a type.
fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "Double",
        DType::F32 => "Float",
        DType::F16 => "Half",
        DType::Bf16 => "BFloat16",
        DType::E4m3 => "Float8_e4m3fn",
        DType::E5m2 => "Float8_e5m2",
        DType::I8 => "Char",
        DType::U8 => "Byte",
        DType::I32 => "Int",
        DType::U32 => "UInt32",
        DType::I64 => "Long",
        DType::U64 => "UInt64",
        _ => "Undefined",
    }
}

fn document(parts: &[&CommDump], form: DumpFormat) -> Value {
    let mut groups: BTreeMap<String, Group> = BTreeMap::new();
    let mut status = Map::new();
    let mut failures = Map::new();
    let mut entries = Vec::new();
    for (pg_id, part) in parts.iter().enumerate() {
        groups.insert(
            part.name.clone(),
            Group {
                name: part.name.clone(),
                description: part.backend.clone(),
                ranks: part.world.clone(),
            },
        );
        status.insert(pg_id.to_string(), part.status(form));
        if let Some(failure) = &part.failure {
            failures.insert(part.name.clone(), json!(failure));
        }
        for record in &part.records {
            let group = part.group(record);
            groups.entry(group.name.clone()).or_insert(group);
            entries.push((record.created_ticks, part.entry(pg_id, record, form)));
        }
    }
    entries.sort_by_key(|(created, _)| *created);
    if parts.len() > 1 {
        // Each communicator has its own numbers, but the analyzer expects increasing ones.
        for (at, (_, entry)) in entries.iter_mut().enumerate() {
            entry["record_id"] = json!(at);
        }
    }
    let config: Map<String, Value> = groups
        .into_iter()
        .map(|(key, group)| {
            let ranks: Vec<String> = group.ranks.iter().map(u32::to_string).collect();
            let value = json!({
                "name": group.name,
                "desc": group.description,
                "ranks": format!("[{}]", ranks.join(", ")),
            });
            (key, value)
        })
        .collect();
    let entries: Vec<Value> = entries.into_iter().map(|(_, entry)| entry).collect();
    json!({
        "version": VERSION,
        "comm_lib_version": parts.first().map_or("", |part| &part.version),
        "pg_config": config,
        "pg_status": status,
        "entries": entries,
        "rank": parts.first().map_or(0, |part| part.world_rank()),
        "host_name": host_name(),
        "fusewire": { "failures": failures },
    })
}

fn pickle(parts: &[&CommDump]) -> io::Result<Vec<u8>> {
    let options = serde_pickle::SerOptions::new().proto_v2();
    serde_pickle::to_vec(&document(parts, DumpFormat::Pickle), options).map_err(io::Error::other)
}

fn host_name() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| name.trim().to_owned())
        .unwrap_or_default()
}

/// Returns the file of a rank of the world: the prefix from the environment and the rank. With
/// torchcomms' dynamic names, the variable holds the complete name.
pub(crate) fn path_of_environment(rank: u32) -> Option<PathBuf> {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
    if flag("TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME") == Some(true) {
        return set("TORCHCOMM_FR_DUMP_TEMP_FILE").map(PathBuf::from);
    }
    let mut name: OsString = [
        "TORCHCOMM_FR_DUMP_TEMP_FILE",
        "TORCH_FR_DUMP_TEMP_FILE",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    ]
    .into_iter()
    .find_map(set)?;
    name.push(rank.to_string());
    Some(name.into())
}

/// Writes a temporary file next to `path` and renames it, so that a reader sees all of it or none.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    // The name does not begin with the prefix of the dumps, because the analyzer reads every file
    // that does.
    let thread = std::thread::current().id();
    let beside = folder.join(format!(".part-{}-{thread:?}", process::id()));
    let written = fs::write(&beside, bytes).and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written
}

#[cfg(test)]
mod tests;
