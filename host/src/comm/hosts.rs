//! Creates communicators across hosts: either kernels reach other hosts through the network's
//! proxy, or kernels run within each host and another library connects the hosts.

use core::net::Ipv4Addr;
use std::sync::Arc;

use fusewire_net::{Tcp, Url};

use super::Communicator;
use super::bootstrap::{Parts, cores, layout};
use super::config::CommConfig;
use super::group::random;
use super::network::{NetworkParts, Proxy};
use crate::backend::Reach;
use crate::memory::{Memory, MemoryDescriptor};
use crate::{Error, Result, digest};

/// Address by which the other ranks reach a rank over the network.
struct NetworkAddress {
    /// URL of its process' proxy.
    url: Url,
    endpoint: u64,
    /// Its workspace, for the ranks of its team.
    workspace: MemoryDescriptor,
    /// Id and start time of its process.
    process: (u32, u64),
}

impl NetworkAddress {
    fn to_bytes(&self) -> Vec<u8> {
        let url = self.url.to_string();
        let mut bytes = self.endpoint.to_le_bytes().to_vec();
        bytes.extend(self.process.0.to_le_bytes());
        bytes.extend(self.process.1.to_le_bytes());
        bytes.extend((url.len() as u32).to_le_bytes());
        bytes.extend(url.as_bytes());
        bytes.extend(self.workspace.to_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (endpoint, rest) = bytes.split_first_chunk()?;
        let (process, rest) = rest.split_first_chunk()?;
        let (start, rest) = rest.split_first_chunk()?;
        let (length, rest) = rest.split_first_chunk()?;
        let (url, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        Some(Self {
            url: str::from_utf8(url).ok()?.parse().ok()?,
            endpoint: u64::from_le_bytes(*endpoint),
            workspace: MemoryDescriptor::from_bytes(rest)?,
            process: (u32::from_le_bytes(*process), u64::from_le_bytes(*start)),
        })
    }
}

impl CommConfig {
    /// Ends the rendezvous of ranks in teams of `team`, which reach each other's memory. Kernels
    /// reach the other ranks by requests. `here` is the number of ranks on this host.
    pub(super) fn over_network(
        self,
        agreed: &str,
        host: &str,
        team: u32,
        here: u32,
    ) -> Result<Communicator> {
        let (rank, size) = (self.rank, self.size);
        let layout = layout(size, team, &self.options);
        let own = rank / team;
        let prepared = self.on_network(own).and_then(|(proxy, endpoint)| {
            let workspace = self.new_workspace(&layout)?;
            let memory = workspace.descriptor()?;
            let address = NetworkAddress {
                url: proxy.url().clone(),
                endpoint,
                process: memory.process(),
                workspace: memory,
            };
            Ok((proxy, endpoint, workspace, address))
        });
        let rendezvous = self.rendezvous();
        let message = match &prepared {
            Ok((.., address)) => address.to_bytes(),
            Err(error) => error.to_string().into_bytes(),
        };
        let messages = rendezvous.exchange("network", &message)?;
        let (proxy, endpoint, workspace, _) = prepared?;
        let mut parts = Parts {
            rank_and_size: (rank, size),
            layout,
            grid: None,
            oversubscribed: false,
            workspaces: Vec::new(),
            processes: Vec::new(),
            blocks: self.options.block_limits(),
            shared: None,
            multicast: false,
            backend: None,
            team,
            network: None,
        };
        let mut remotes = Vec::new();
        let mut open = |other: u32, message: &Vec<u8>| -> Result<()> {
            let address = NetworkAddress::from_bytes(message).ok_or_else(|| {
                let reason = String::from_utf8_lossy(message);
                rendezvous.refuse(format!("rank {other} cannot take part: {reason}"))
            })?;
            let is_near = other / team == own;
            parts.processes.push(is_near.then_some(address.process));
            parts.workspaces.push(match is_near {
                true if other == rank => Some(workspace.clone()),
                true => Some(Memory::open(self.device, &address.workspace, other)?),
                false => {
                    remotes.push(proxy.remote(other, &address.url, address.endpoint));
                    None
                }
            });
            Ok(())
        };
        let mut ranks = (0..).zip(&messages);
        let opened = ranks.try_for_each(|(other, message)| open(other, message));
        rendezvous.all_agree(opened)?;
        parts.network = Some(NetworkParts {
            proxy,
            endpoint,
            remotes,
        });
        parts.oversubscribed = rendezvous.broadcast_bool("oversubscribed", here > cores())?;
        let key = rendezvous.exchange_key("network", rank);
        let store = Arc::clone(&self.store);
        let reach = Reach::Network;
        let comm = Communicator::assemble_and_end(Self { reach, ..self }, parts, agreed, host)?;
        // A key that cannot be deleted remains, but no later rendezvous uses it.
        let _ = store.delete(&key);
        Ok(comm)
    }

    /// Returns the proxy of this process, and a number for this rank's endpoint. `team` is the
    /// number of this rank's team.
    fn on_network(&self, team: u32) -> Result<(Arc<Proxy>, u64)> {
        if self.device.is_gpu() {
            return Err(Error::InvalidArgument {
                operation: "new_comm",
                detail: "the proxy connects ranks on the CPU only; connect hosts with GPUs by \
                         inter_host gloo (feature gloo), or use backend nccl or rccl"
                    .to_owned(),
            });
        }
        let key = match self.options.testing.ranks_per_host {
            Some(_) => {
                let host = (digest::of_text(&self.prefix), team);
                (Ipv4Addr::LOCALHOST.into(), Some(host))
            }
            None => (Tcp::automatic()?.address(), None),
        };
        Ok((Proxy::of_process(key)?, random()?))
    }
}

#[cfg(feature = "gloo")]
mod over_gloo {
    use std::sync::Arc;

    use super::super::observe::Hooks;
    use super::{CommConfig, Communicator, Reach, Result};
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
    /// Returns an error, because this build has no backend Gloo.
    pub(super) fn over_hosts(
        self,
        _agreed: &str,
        _here: Vec<u32>,
        (rank, theirs): &(u32, String),
    ) -> Result<Communicator> {
        let own = crate::bootstrap::host_id()?;
        Err(Error::Communicator {
            name: self.name,
            detail: format!(
                "rank {rank} is on another host ({theirs}) than rank {} ({own}), and Gloo, which \
                 would connect them, is not in this build: build with --features gloo{}",
                self.rank,
                match self.device.is_gpu() {
                    true => "",
                    false => ", or choose inter_host proxy",
                }
            ),
        })
    }
}
