//! Rank claims: each rank number of a rendezvous belongs to one live process.

use core::sync::atomic::{AtomicU32, Ordering};

use crate::bootstrap::QUERY_METHOD;
use crate::store::Store;
use crate::{Error, Result, process};

/// The claim of a rank number in a rendezvous of a communicator's name.
#[derive(Debug)]
pub(in crate::comm) struct RankClaim {
    /// Prefix of the keys of this rendezvous.
    pub(in crate::comm) prefix: String,
}

impl RankClaim {
    /// Claims `rank` in the current rendezvous of `name`. Fails if another live process has claimed
    /// it.
    pub(in crate::comm) fn take(
        store: &dyn Store,
        name: &str,
        rank: u32,
        host: &str,
    ) -> Result<Self> {
        /// Distinguishes threads of one process.
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let own = format!("{}/{count}/{host}", std::process::id());
        loop {
            let number = store.add(&number_key(name), 0)?;
            let prefix = format!("fusewire/{name}/{number}");
            let key = format!("{prefix}/claim/{rank}");
            let mut there = store.compare_set(&key, b"", own.as_bytes())?;
            if there != own.as_bytes() && is_dead(&there, host) {
                there = store.compare_set(&key, &there, own.as_bytes())?;
            }
            // The rendezvous may have ended before the claim. The loop then tries the next one.
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
            let holder = there.split('/').next().unwrap_or_default();
            let detail = format!(
                "rank {rank} was started twice: process {holder} ({there}) has joined as this \
                 rank, and process {} ({own}) wants to; either RANK is set wrong, or the rank was \
                 read from variables of an outer launcher (set {QUERY_METHOD} to the inner one), \
                 or the store belongs to another job (MASTER_PORT)",
                std::process::id()
            );
            // The waiting ranks report this, unless the rendezvous completes without this process.
            let key = duplicate_key(&prefix);
            let _ = store.set(&key, detail.as_bytes());
            // If the rendezvous has ended in the meantime, no rank deletes the key.
            if store.add(&number_key(name), 0).ok() != Some(number) {
                let _ = store.delete(&key);
            }
            return Err(Error::Communicator {
                name: name.to_owned(),
                detail,
            });
        }
    }
}

/// Returns the key under which a rank that was started twice is reported.
pub(super) fn duplicate_key(prefix: &str) -> String {
    format!("{prefix}/duplicate")
}

/// Returns the key of the number of the current rendezvous.
pub(super) fn number_key(name: &str) -> String {
    format!("fusewire/{name}/number")
}

/// Returns true if the claim is that of a process on this host that has ended.
fn is_dead(claim: &[u8], host: &str) -> bool {
    let Ok(claim) = str::from_utf8(claim) else {
        return false;
    };
    let mut parts = claim.splitn(3, '/');
    let (process, _, theirs) = (parts.next(), parts.next(), parts.next());
    theirs == Some(host)
        && process
            .and_then(|process| process.parse::<u32>().ok())
            .is_some_and(process::is_gone)
}
