//! Tests object collectives, which transfer serialized Rust values.

use core::time::Duration;
use std::collections::BTreeMap;

use fusewire::{Communicator, Error, Options, Result};
use fusewire_tests::device::run_threads;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Shape {
    Empty,
    Named(String),
    Sized { rows: u64, scale: f64 },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Plan {
    rank: u32,
    shapes: Vec<Shape>,
    table: BTreeMap<String, Option<i64>>,
}

fn plan(rank: u32) -> Plan {
    Plan {
        rank,
        shapes: (0..rank * 40)
            .map(|i| match i % 3 {
                0 => Shape::Empty,
                1 => Shape::Named(format!("layer {i} \u{e4}")),
                _ => Shape::Sized {
                    rows: u64::MAX - u64::from(i),
                    scale: -0.5,
                },
            })
            .collect(),
        table: BTreeMap::from([("a".to_owned(), None), (format!("r{rank}"), Some(-7))]),
    }
}

fn options() -> Options {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(20);
    options.testing.spins = Some(200);
    options.max_object_bytes = 100_000;
    options
}

fn all<R: Send>(ranks: u32, body: impl Fn(Communicator) -> Result<R> + Sync) -> Vec<R> {
    run_threads(ranks, &options(), body)
        .into_iter()
        .map(|result| result.unwrap_or_else(|error| panic!("{error}")))
        .collect()
}

#[test]
fn every_object_operation() {
    for ranks in [1, 2, 3, 5] {
        all(ranks, |comm| {
            let (rank, size) = (comm.rank(), comm.size());
            let expected: Vec<Plan> = (0..size).map(plan).collect();
            assert_eq!(comm.all_gather_object(&plan(rank))?, expected);
            for root in 0..size {
                let gathered = comm.gather_object(&plan(rank), root)?;
                assert_eq!(gathered, (rank == root).then(|| expected.clone()));
                let mut list = if rank == root {
                    expected.clone()
                } else {
                    Vec::new()
                };
                comm.broadcast_object_list(&mut list, root)?;
                assert_eq!(list, expected);
                let list = if rank == root {
                    expected.clone()
                } else {
                    Vec::new()
                };
                assert_eq!(comm.scatter_object_list(&list, root)?, plan(rank));
            }
            if size > 1 {
                let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
                // The objects are small, so the send returns before the peer receives.
                comm.send_object_list(&[plan(rank), plan(rank + 1)], next)?;
                let received: Vec<Plan> = comm.recv_object_list(before)?;
                assert_eq!(received, [plan(before), plan(before + 1)]);
            }
            assert_eq!(comm.all_gather_object(&())?, vec![(); size as usize]);
            comm.barrier()
        });
    }
}

#[test]
fn another_type_is_an_error_that_names_both() {
    all(2, |comm| {
        if comm.rank() == 0 {
            comm.send_object_list(&["text"], 1)?;
        } else {
            let error = comm
                .recv_object_list::<u64>(0)
                .expect_err("text is no number");
            assert!(matches!(error, Error::Object { rank: 0, .. }));
            let text = error.to_string();
            assert!(text.contains("&str") && text.contains("u64"), "{text}");
        }
        // The communicator remains usable.
        comm.barrier()
    });
}

#[test]
fn objects_that_are_too_large_are_an_error_on_every_rank() {
    all(3, |comm| {
        let mine = vec![7u8; if comm.rank() == 1 { 200_000 } else { 10 }];
        let error = comm.all_gather_object(&mine).expect_err("too large");
        assert!(matches!(error, Error::Object { rank: 1, .. }), "{error}");
        let mut list = vec![mine.clone()];
        let error = comm
            .broadcast_object_list(&mut list, 1)
            .expect_err("too large");
        assert!(matches!(error, Error::Object { rank: 1, .. }), "{error}");
        let list = if comm.rank() == 1 {
            vec![mine.clone(); 3]
        } else {
            Vec::new()
        };
        assert!(comm.scatter_object_list(&list, 1).is_err());
        let list = if comm.rank() == 1 {
            vec![mine.clone(); 2]
        } else {
            Vec::new()
        };
        assert!(
            comm.scatter_object_list(&list, 1).is_err(),
            "two objects for three ranks"
        );
        if comm.rank() == 1 {
            assert!(comm.send_object_list(&[mine], 0).is_err());
            // The peer gets an error too: it has received only the size of the object.
        } else if comm.rank() == 0 {
            let error = comm.recv_object_list::<Vec<u8>>(1).expect_err("too large");
            assert!(error.to_string().contains("rank 1"), "{error}");
        }
        comm.barrier()
    });
}

#[test]
fn an_object_that_cannot_be_encoded_is_an_error_without_a_limit_too() {
    let mut unlimited = options();
    unlimited.max_object_bytes = u64::MAX;
    for result in run_threads(2, &unlimited, |comm| {
        // A value that cannot be serialized.
        #[derive(serde::Deserialize)]
        struct Unserializable;
        impl Serialize for Unserializable {
            fn serialize<S: serde::Serializer>(
                &self,
                _: S,
            ) -> core::result::Result<S::Ok, S::Error> {
                Err(serde::ser::Error::custom("it will not"))
            }
        }
        let error = comm
            .all_gather_object(&Unserializable)
            .err()
            .expect("not encoded");
        assert!(matches!(error, Error::Object { .. }), "{error}");
        comm.barrier()
    }) {
        result.unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn a_root_out_of_range_is_refused() {
    all(2, |comm| {
        assert!(comm.gather_object(&1, 2).is_err());
        assert!(comm.broadcast_object_list(&mut vec![1], 2).is_err());
        assert!(comm.scatter_object_list(&[1, 2], 2).is_err());
        comm.barrier()
    });
}

/// A list as nested enum variants, which the decoder reads by recursion.
#[derive(Serialize, Deserialize)]
enum Chain {
    Link(Box<Self>),
    End,
}

impl Chain {
    fn new(links: usize) -> Self {
        (0..links).fold(Self::End, |chain, _| Self::Link(Box::new(chain)))
    }

    fn links(&self) -> usize {
        let (mut links, mut at) = (0, self);
        while let Self::Link(next) = at {
            (links, at) = (links + 1, next);
        }
        links
    }
}

/// An object that is nested too deep must not overflow the stack of the rank that receives it.
#[test]
fn deep_objects_are_refused() {
    for (links, fits) in [(500, true), (50_000, false)] {
        for result in run_threads(2, &Options::default(), |comm| {
            let receive = || comm.recv_object_list::<Chain>(0);
            let send = || comm.send_object_list(&[Chain::new(links)], 1);
            if comm.rank() == 1 {
                let received = receive();
                assert_eq!(received.is_ok(), fits, "{links} links");
                match received {
                    Ok(list) => assert_eq!(list[0].links(), links),
                    Err(error) => assert!(error.to_string().contains("nested"), "{error}"),
                }
                return Ok(());
            }
            // Encoding and dropping recurse as well.
            std::thread::scope(|scope| {
                let large = std::thread::Builder::new().stack_size(256 << 20);
                let sender = large.spawn_scoped(scope, send).expect("a thread");
                sender.join().expect("the sender")
            })
        }) {
            result.expect("both ranks");
        }
    }
}
