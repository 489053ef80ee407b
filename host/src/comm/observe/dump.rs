//! The flight record in PyTorch's format, which its analyser
//! (`torch.distributed.flight_recorder.fr_trace`) reads: a pickle; as JSON for people and other
//! tools.
//!
//! What has to match between ranks is a *process group* of its own: the collectives of a
//! communicator; the transfers from one rank to one other (the analyser expects every rank of a
//! group in every entry of it); and both again for replays of graphs, which are counted when they
//! run, not when they are issued.
//!
//! Limits: an operation's timeout is given as the communicator's, whatever the call's was; and
//! once the ring has overflowed, the analyser aligns ranks by the number of an operation, which
//! ranks with different numbers of sends and receives do not agree on.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::{env, fs, io, process};

use fusewire_device::DType;
use fusewire_device::session::Operation;
use serde_json::{Map, Value, json};

use super::{FlightRecord, RecordState};
use crate::options::flag;

/// Version of the format.
const VERSION: &str = "2.10";

/// Failed communicators whose records the process keeps, so that the file of a rank has all of
/// them.
const KEPT: usize = 16;

/// How a dump is written down. PyTorch's two forms differ in how absent times and numbers of a
/// status are written.
#[derive(Clone, Copy, PartialEq)]
enum DumpFormat {
    Json,
    Pickle,
}

/// What one communicator adds to a dump.
#[derive(Clone, Debug)]
pub(crate) struct CommDump {
    /// Name of the communicator.
    pub(crate) name: String,
    /// Its backend.
    pub(crate) backend: String,
    /// Version of the backend.
    pub(crate) version: String,
    /// Its ranks, as ranks of the world.
    pub(crate) world: Vec<u32>,
    /// This rank, as an index of `world`.
    pub(crate) rank: u32,
    /// Bound of a wait, milliseconds.
    pub(crate) timeout_ms: u64,
    /// Why it failed, where it has.
    pub(crate) failure: Option<String>,
    /// Its operations.
    pub(crate) records: Vec<FlightRecord>,
}

/// A process group of the dump.
struct Group {
    name: String,
    description: String,
    /// Ranks of the world.
    ranks: Vec<u32>,
}

impl CommDump {
    /// As JSON text.
    pub(crate) fn json(&self) -> String {
        document(&[self], DumpFormat::Json).to_string()
    }

    /// Writes it to `path`, as a pickle.
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        replace(path, &pickle(&[self])?)
    }

    /// Writes it where the environment says, with what other failed communicators of this process
    /// have written there. Gives the path, or `None` where the environment names none.
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

    /// The group of a record.
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

    /// From where to where, for a send or a receive.
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

    /// A name that the analyser knows. Ranks of a transfer are those of its group.
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
            Operation::AllReduce => "all_reduce",
            Operation::ReduceScatter | Operation::ReduceScatterOnArrival => "reduce_scatter",
            Operation::AllGather | Operation::AllGatherWithFlags => "all_gather",
            // What PyTorch calls an all_gather of different counts; `all_gather_v` is unknown to
            // older analysers.
            Operation::AllGatherV => "ALLGATHER_coalesced",
            Operation::Broadcast => "broadcast",
            Operation::Reduce => "reduce",
            Operation::Scatter => "scatter",
            Operation::Gather => "gather",
            Operation::AllToAll | Operation::AllToAllV => "all_to_all",
            Operation::Barrier => "all_reduce_barrier",
            // It knows no fused operation, and no kernel of a user's: these match only themselves.
            Operation::AllReduceNorm => "allreduce_coalesced",
            Operation::ReduceScatterNorm => "reduce_scatter_tensor_coalesced",
            Operation::VocabParallel => "all_gather_into_tensor_coalesced",
            // A batch's transfers are one entry of theirs, and it knows no one-sided operations.
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

    /// Sequence numbers of the last collective that was issued, has started, has ended; -1 for
    /// none.
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

/// Sizes of input and output as the analyser compares them: equal on all ranks where an operation
/// does not let them differ, and `[[]]`, which it does not look at, where counts differ by rank.
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

/// Name of a type, as PyTorch prints it.
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
        // Numbers are those of one communicator each; the analyser wants them to grow.
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

/// The file of a rank of the world: the prefix of the environment and the rank. With torchcomms'
/// dynamic names the variable is the whole name.
fn path_of_environment(rank: u32) -> Option<PathBuf> {
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

/// Writes a file beside `path` and gives it that name, so that a reader sees all of it or none.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    // Without the prefix of the dumps in its name: the analyser reads every file that has it.
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
