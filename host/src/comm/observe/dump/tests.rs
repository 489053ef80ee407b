//! Dumps of operations that have completed, that wait, or that a rank never called.

use core::time::Duration;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use fusewire_device::DType;
use serde_json::{Value, json};

use crate::{Communicator, Options, ReduceOp, Result, run_threads};

fn options() -> Options {
    Options {
        timeout: Duration::from_secs(20),
        ..Options::default()
    }
}

fn dump(comm: &Communicator) -> Value {
    serde_json::from_str(&comm.dump_flight_record()).expect("the dump is JSON")
}

fn entries(dump: &Value) -> &[Value] {
    dump["entries"].as_array().expect("a list of entries")
}

/// Returns one field of all entries.
fn column(dump: &Value, key: &str) -> Vec<Value> {
    entries(dump)
        .iter()
        .map(|entry| entry[key].clone())
        .collect()
}

fn all<R: Send>(size: u32, options: &Options, body: impl Fn(Communicator) -> Result<R> + Sync) {
    for rank in run_threads(size, options, body) {
        rank.expect("the rank succeeds");
    }
}

#[test]
fn an_entry_has_what_pytorch_gives() {
    all(2, &options(), |comm| {
        let mut x = [1f32; 20_000];
        comm.all_reduce(x.as_mut_slice(), ReduceOp::Sum)?;
        comm.barrier()?;
        let dump = dump(&comm);
        assert_eq!(dump["version"], "2.10");
        assert_eq!(
            dump["pg_config"],
            json!({"threads": {"name": "threads", "desc": "fusewire", "ranks": "[0, 1]"}})
        );
        assert_eq!(
            dump["pg_status"]["0"],
            json!({
                "last_enqueued_collective": "2",
                "last_started_collective": "2",
                "last_completed_collective": "2",
            })
        );
        let entry = &entries(&dump)[0];
        for (key, value) in [
            ("frames", json!([])),
            ("record_id", json!(0)),
            ("pg_id", json!(0)),
            ("process_group", json!(["threads", "fusewire"])),
            ("collective_seq_id", json!(1)),
            ("p2p_seq_id", json!(0)),
            ("op_id", json!(1)),
            ("profiling_name", json!("nccl:all_reduce")),
            ("input_sizes", json!([[20_000]])),
            ("input_dtypes", json!(["Float"])),
            ("output_sizes", json!([[20_000]])),
            ("output_dtypes", json!(["Float"])),
            ("state", json!("completed")),
            ("retired", json!(true)),
            ("timeout_ms", json!(20_000)),
            ("is_p2p", json!(false)),
        ] {
            assert_eq!(entry[key], value, "{key}");
        }
        let time = |key: &str| entry[key].as_u64().expect("nanoseconds");
        let times = [
            time("time_created_ns"),
            time("time_discovered_started_ns"),
            time("time_discovered_completed_ns"),
        ];
        assert!(times.is_sorted() && times[0] > 1_600_000_000_000_000_000);
        let duration = entry["duration_ms"].as_f64().expect("milliseconds");
        assert!((duration - (times[2] - times[1]) as f64 * 1e-6).abs() < 1e-3);
        // A short operation ends without a time, and is complete.
        let barrier = &entries(&dump)[1];
        assert_eq!(barrier["state"], "completed");
        assert_eq!(barrier["time_discovered_completed_ns"], 0);
        assert!(barrier.get("duration_ms").is_none());
        assert_eq!(barrier["profiling_name"], "nccl:all_reduce_barrier");
        assert_eq!(barrier["input_dtypes"], json!([]));
        Ok(())
    });
}

#[test]
fn types_have_pytorchs_names() {
    let names = [
        "Double",
        "Float",
        "Half",
        "BFloat16",
        "Float8_e4m3fn",
        "Float8_e5m2",
        "Char",
        "Byte",
        "Int",
        "UInt32",
        "Long",
        "UInt64",
        // PyTorch has no such type.
        "Undefined",
    ];
    assert_eq!(DType::ALL.map(super::type_name), names);
}

#[test]
fn ranks_number_collectives_alike_whatever_they_send() {
    let dumps = run_threads(3, &options(), |comm| {
        let mut x = [1i64; 4];
        // Two sends before the first collective, on two of three ranks, and one in the other
        // direction.
        match comm.rank() {
            0 => {
                comm.send(x.as_slice(), 1)?;
                comm.send(x.as_slice(), 1)?;
                comm.recv(x.as_mut_slice(), 1)?;
            }
            1 => {
                comm.recv(x.as_mut_slice(), 0)?;
                comm.recv(x.as_mut_slice(), 0)?;
                comm.send(x.as_slice(), 0)?;
            }
            _ => {}
        }
        comm.all_reduce(x.as_mut_slice(), ReduceOp::Sum)?;
        comm.all_reduce(x.as_mut_slice(), ReduceOp::Max)?;
        Ok(dump(&comm))
    });
    for (rank, dump) in dumps.into_iter().enumerate() {
        let dump = dump.expect("the rank succeeds");
        let seen: Vec<_> = entries(&dump)
            .iter()
            .map(|entry| {
                assert_eq!(entry["is_p2p"], json!(entry["p2p_seq_id"] != 0));
                format!(
                    "{} {} {}",
                    entry["process_group"][0].as_str().expect("a name"),
                    entry["profiling_name"].as_str().expect("a name"),
                    entry["collective_seq_id"]
                )
            })
            .collect();
        let transfers: &[&str] = match rank {
            0 => &[
                "threads.0to1 nccl:send 0->1 1",
                "threads.0to1 nccl:send 0->1 2",
                "threads.1to0 nccl:recv 0<-1 1",
            ],
            1 => &[
                "threads.0to1 nccl:recv 1<-0 1",
                "threads.0to1 nccl:recv 1<-0 2",
                "threads.1to0 nccl:send 1->0 1",
            ],
            _ => &[],
        };
        let collectives = ["threads nccl:all_reduce 1", "threads nccl:all_reduce 2"];
        assert_eq!(seen, [transfers, &collectives].concat(), "rank {rank}");
    }
}

#[test]
fn a_full_ring_keeps_the_last() {
    let mut options = options();
    options.flight_recorder_entries = 8;
    all(2, &options, |comm| {
        for _ in 0..21 {
            comm.barrier()?;
        }
        let dump = dump(&comm);
        let last: Vec<Value> = (14..=21).map(|id| json!(id)).collect();
        assert_eq!(column(&dump, "op_id"), last);
        assert_eq!(column(&dump, "collective_seq_id"), last);
        Ok(())
    });
    options.flight_recorder_entries = 0;
    all(2, &options, |comm| {
        comm.barrier()?;
        assert_eq!(column(&dump(&comm), "op_id"), [Value::Null; 0]);
        Ok(())
    });
}

#[test]
fn an_enqueued_operation_is_scheduled_started_completed() {
    let seen = Barrier::new(2);
    all(2, &options(), |comm| {
        let x = comm.alloc(DType::F32, 100)?;
        if comm.rank() == 1 {
            seen.wait();
        }
        let works = [
            comm.all_reduce_async(&x, ReduceOp::Sum)?,
            comm.all_reduce_async(&x, ReduceOp::Sum)?,
        ];
        if comm.rank() == 0 {
            // The first operation cannot end before the other rank calls it, so the second cannot
            // start.
            let started = Instant::now();
            while column(&dump(&comm), "state") != ["started", "scheduled"] {
                assert!(
                    started.elapsed() < Duration::from_secs(10),
                    "{}",
                    dump(&comm)
                );
                thread::sleep(Duration::from_millis(1));
            }
            let dump = dump(&comm);
            assert_eq!(column(&dump, "time_discovered_completed_ns"), [0, 0]);
            assert_eq!(column(&dump, "retired"), [false, false]);
            assert_eq!(
                dump["pg_status"]["0"],
                json!({
                    "last_enqueued_collective": "2",
                    "last_started_collective": "1",
                    "last_completed_collective": "-1",
                })
            );
            seen.wait();
        }
        for work in works {
            work.wait_blocking()?;
        }
        assert_eq!(column(&dump(&comm), "state"), ["completed", "completed"]);
        Ok(())
    });
}

#[test]
fn replays_are_a_group_of_their_own() {
    all(2, &options(), |comm| {
        let x = comm.alloc(DType::F32, 100)?;
        comm.stream().begin_capture()?;
        comm.all_reduce_async(&x, ReduceOp::Sum)?;
        let graph = comm.stream().end_capture()?.instantiate()?;
        comm.barrier()?;
        for _ in 0..2 {
            comm.stream().wait(graph.launch(comm.stream())?, None)?;
        }
        comm.barrier()?;
        let dump = dump(&comm);
        let groups: Vec<_> = entries(&dump)
            .iter()
            .map(|entry| entry["process_group"][0].clone())
            .collect();
        assert_eq!(
            groups,
            ["threads", "threads.replay", "threads.replay", "threads"]
        );
        assert_eq!(column(&dump, "collective_seq_id"), [1, 1, 2, 2]);
        Ok(())
    });
}

#[test]
fn a_part_gives_the_ranks_of_the_whole() {
    all(3, &options(), |comm| {
        let list: &[u32] = if comm.rank() == 1 { &[] } else { &[2, 0] };
        if let Some(part) = comm.split(list, "outer")? {
            let again = part.dup()?;
            again.barrier()?;
            let dump = dump(&again);
            let config = dump["pg_config"].as_object().expect("groups");
            let ranks: Vec<_> = config.values().map(|group| &group["ranks"]).collect();
            assert_eq!(ranks, ["[2, 0]"]);
            assert_eq!(dump["rank"], comm.rank());
        }
        comm.barrier()
    });
}

#[test]
fn communicators_of_one_process_share_a_dump() {
    all(3, &options(), |comm| {
        comm.barrier()?;
        let part = comm.split(if comm.rank() == 1 { &[1] } else { &[0, 2] }, "some")?;
        let part = part.expect("every rank is in a list");
        part.barrier()?;
        comm.barrier()?;
        let mut parts = [comm.inner.part(), part.inner.part()];
        // Each part calibrates its conversion of ticks to dates separately, and a preemption
        // between two clock reads distorts the calibration.
        for record in &mut parts[1].records {
            record.created_ns -= 1_000_000;
        }
        let dump = super::document(&[&parts[0], &parts[1]], super::DumpFormat::Pickle);
        assert_eq!(dump["rank"], comm.rank());
        assert_eq!(
            dump["pg_config"][part.full_name()]["name"],
            part.full_name()
        );
        assert_eq!(dump["pg_config"]["threads"]["ranks"], "[0, 1, 2]");
        assert_eq!(dump["pg_status"]["0"]["last_completed_collective"], 2);
        assert_eq!(dump["pg_status"]["1"]["last_completed_collective"], 1);
        assert_eq!(column(&dump, "record_id"), [0, 1, 2]);
        assert_eq!(column(&dump, "pg_id"), [0, 1, 0]);
        assert_eq!(column(&dump, "collective_seq_id"), [1, 1, 2]);
        Ok(())
    });
}

#[test]
fn a_file_is_replaced_whole_or_an_error_is_given() -> std::io::Result<()> {
    let folder = std::env::temp_dir().join(format!("fusewire-dump-{}", std::process::id()));
    let path = folder.join("deep").join("fw_0");
    super::replace(&path, b"first, longer")?;
    super::replace(&path, b"second")?;
    assert_eq!(std::fs::read(&path)?, b"second");
    let names: Vec<_> = std::fs::read_dir(folder.join("deep"))?
        .map(|entry| entry.map(|entry| entry.file_name()))
        .collect::<std::io::Result<_>>()?;
    assert_eq!(names, ["fw_0"]);
    // A file cannot replace a folder, and the temporary file is removed.
    assert!(super::replace(&folder.join("deep"), b"third").is_err());
    assert_eq!(std::fs::read_dir(&folder)?.count(), 1);
    std::fs::remove_dir_all(&folder)
}
