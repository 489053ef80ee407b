//! Seats: each rank takes its own once in a rendezvous.

use core::sync::atomic::{AtomicU32, Ordering};
use std::path::Path;

use crate::store::Store;
use crate::{Error, Result};

/// A place among those who meet under a name.
#[derive(Debug)]
pub(in crate::comm) struct Seat {
    /// What the keys of this rendezvous begin with.
    pub(in crate::comm) prefix: String,
}

impl Seat {
    /// Takes the seat of `rank` in the present rendezvous of `name`.
    pub(in crate::comm) fn take(
        store: &dyn Store,
        name: &str,
        rank: u32,
        host: &str,
    ) -> Result<Self> {
        /// Tells threads of one process from each other.
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let own = format!("{}/{count}/{host}", std::process::id());
        loop {
            let number = store.add(&number_key(name), 0)?;
            let prefix = format!("fusewire/{name}/{number}");
            let key = format!("{prefix}/seat/{rank}");
            let mut there = store.compare_set(&key, b"", own.as_bytes())?;
            if there != own.as_bytes() && is_dead(&there, host) {
                there = store.compare_set(&key, &there, own.as_bytes())?;
            }
            // The rendezvous may have ended before the seat was taken; then there is a next one.
            let taken = there == own.as_bytes();
            if store.add(&number_key(name), 0)? != number {
                if taken {
                    let _ = store.delete(&key);
                }
                continue;
            }
            if taken {
                return Ok(Self { prefix });
            }
            let there = String::from_utf8_lossy(&there).into_owned();
            let process = there.split('/').next().unwrap_or_default();
            return Err(Error::Communicator {
                name: name.to_owned(),
                detail: format!(
                    "rank {rank} is taken, by process {process} ({there}): each rank joins once"
                ),
            });
        }
    }
}

pub(super) fn number_key(name: &str) -> String {
    format!("fusewire/{name}/number")
}

/// Whether a seat is that of a process of this host which is no more.
fn is_dead(seat: &[u8], host: &str) -> bool {
    let Ok(seat) = str::from_utf8(seat) else {
        return false;
    };
    let mut parts = seat.splitn(3, '/');
    let (process, _, theirs) = (parts.next(), parts.next(), parts.next());
    theirs == Some(host)
        && process
            .and_then(|process| process.parse::<u32>().ok())
            .is_some_and(|process| !Path::new(&format!("/proc/{process}")).exists())
}
