//! Communicators across hosts: Fusewire's kernels within each host, another library between hosts.

use super::Communicator;
use super::config::CommConfig;
use crate::Result;

#[cfg(feature = "gloo")]
mod over_gloo {
    use std::sync::Arc;

    use super::super::observe::Hooks;
    use super::{CommConfig, Communicator, Result};
    use crate::backend::Reach;
    use crate::bootstrap::host_id;
    use crate::comm::hierarchy::Hierarchy;

    impl CommConfig {
        /// Ends the rendezvous of ranks on several hosts, of which `here` are on this one. Joins
        /// the ranks of each host, then all ranks.
        pub(in crate::comm) fn over_hosts(
            self,
            agreed: &str,
            here: Vec<u32>,
            _elsewhere: &(u32, String),
        ) -> Result<Communicator> {
            let mut options = self.options.clone();
            // Only the whole communicator has a flight record and a watchdog.
            options.flight_recorder_entries = 0;
            options.abort_process_on_timeout_or_error = Some(false);
            let local_rank = here.iter().position(|rank| *rank == self.rank);
            let local = Self {
                device: self.device,
                rank: local_rank.unwrap_or_default() as u32,
                size: here.len() as u32,
                store: Arc::clone(&self.store),
                has_private_store: false,
                name: format!("{} on the host of rank {}", self.name, here[0]),
                label: self.label.clone(),
                // Must not end with a number, because the prefixes of rendezvous end with one.
                prefix: format!("{}/host-{}", self.prefix, here[0]),
                options,
                generation: self.generation,
                hooks: Hooks::default(),
                rendezvous_timeout: self.rendezvous_timeout,
                reach: Reach::Host,
                parent: None,
                replaced: self.replaced.clone(),
                members: Vec::new(),
            };
            let local = Communicator::form(local)?;
            let made = Hierarchy::new(&self.setup(Reach::Network), local, here)?;
            self.rendezvous().end("made", agreed, &host_id()?, &[])?;
            let reach = Reach::Network;
            Communicator::over(Arc::new(made), Self { reach, ..self })
        }
    }
}

#[cfg(not(feature = "gloo"))]
impl CommConfig {
    /// Returns an error, because this build has no transport between hosts.
    pub(super) fn over_hosts(
        self,
        _agreed: &str,
        _here: Vec<u32>,
        (rank, theirs): &(u32, String),
    ) -> Result<Communicator> {
        let own = crate::bootstrap::host_id()?;
        Err(crate::Error::Communicator {
            name: self.name,
            detail: format!(
                "rank {rank} is on another host ({theirs}) than rank {} ({own}): memory cannot be \
                 shared, and this build has no transport between hosts; build with --features gloo",
                self.rank
            ),
        })
    }
}
