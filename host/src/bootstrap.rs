//! Rank, size, store and host, found out from the environment.
//!
//! The variables and their order are torchcomms' (`comms/torchcomms/utils/Utils.cpp`), so that a
//! program starts under `torchrun` or `fusewire run` without options, and under `mpirun`, `srun` or
//! PALS with the store's address in `MASTER_ADDR` and `MASTER_PORT`, or without where all ranks are
//! on one host.
//!
//! | variable | meaning |
//! |---|---|
//! | `MASTER_ADDR`, `MASTER_PORT` | where rank 0, or a launcher's agent, serves the store |
//! | `FUSEWIRE_STORE_SECRET` | secret of clients and server; refuses clients of PyTorch |
//! | `FUSEWIRE_STORE_BIND` | rank 0's address; else `MASTER_ADDR`'s, or all with a secret |
//! | `FUSEWIRE_STORE_PROTOCOL` | `current` or `legacy` (PyTorch before 2.1), else found out |
//! | `FUSEWIRE_HOST_ID` | name of this host, else the kernel's boot id |
//! | `FUSEWIRE_NVLINK_DOMAIN` | NVLink domain of this host's GPUs, or empty; else NVML's answer |

mod local;
#[cfg(test)]
mod tests;

use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use std::env;
use std::fs;
use std::io::ErrorKind;
use std::sync::Arc;

use crate::store::{PrefixStore, Store, StoreSecret, TcpStore, TcpStoreServer};
use crate::{Error, Result, notice};

/// Rank of this process and number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankSize {
    /// Index of this rank, less than `size`.
    pub rank: u32,
    /// Number of ranks, at least 1.
    pub size: u32,
    /// Index of this rank on its host, if the launcher sets it.
    pub local_rank: Option<u32>,
    /// Number of ranks on this host, if the launcher sets it.
    pub local_size: Option<u32>,
}

/// The variables of one launcher.
struct Launcher {
    method: Method,
    rank: &'static str,
    size: &'static str,
    /// Names of which the first that is set counts.
    local_rank: &'static [&'static str],
    local_size: &'static [&'static str],
}

/// Values of `TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD` that restrict the search.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Method {
    /// Explicit variables, which every value of the setting reads.
    Always,
    Mpi,
    Pals,
    Torchrun,
    Slurm,
}

/// In torchcomms' order, and Slurm: the first launcher whose variables are there wins. Slurm is
/// last, for its variables are also there in what `torchrun` or `fusewire run` start within a step.
const LAUNCHERS: [Launcher; 6] = [
    Launcher {
        method: Method::Always,
        rank: "TORCHCOMM_RANK",
        size: "TORCHCOMM_SIZE",
        local_rank: &["LOCAL_RANK"],
        local_size: &["LOCAL_WORLD_SIZE"],
    },
    Launcher {
        method: Method::Mpi,
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
    },
    Launcher {
        method: Method::Mpi,
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: &["PMI_LOCAL_RANK", "MPI_LOCALRANKID"],
        local_size: &["PMI_LOCAL_SIZE", "MPI_LOCALNRANKS"],
    },
    Launcher {
        method: Method::Pals,
        rank: "PALS_RANKID",
        size: "PALS_SIZE",
        local_rank: &["PALS_LOCAL_RANKID"],
        local_size: &["PALS_LOCAL_SIZE"],
    },
    Launcher {
        method: Method::Torchrun,
        rank: "RANK",
        size: "WORLD_SIZE",
        local_rank: &["LOCAL_RANK"],
        local_size: &["LOCAL_WORLD_SIZE"],
    },
    Launcher {
        method: Method::Slurm,
        rank: "SLURM_PROCID",
        size: "SLURM_NTASKS",
        local_rank: &["SLURM_LOCALID"],
        // Slurm gives it only as a list of all hosts; see `Launcher::read`.
        local_size: &[],
    },
];

/// Address that rank 0's store listens at, in place of that of `MASTER_ADDR`.
const BIND: &str = "FUSEWIRE_STORE_BIND";

/// Restricts the search for rank and size to one launcher.
pub(crate) const QUERY_METHOD: &str = "TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD";

/// Set by torchrun (and by `fusewire run`) for every process that it starts, and inherited by the
/// processes that those start.
const TORCHRUN_JOB: &str = "TORCHELASTIC_RUN_ID";

impl Method {
    /// The value of [`QUERY_METHOD`] that selects it.
    fn value(self) -> &'static str {
        match self {
            Self::Always => "env",
            Self::Mpi => "mpi",
            Self::Pals => "pals",
            Self::Torchrun => "torchrun",
            Self::Slurm => "slurm",
        }
    }
}

impl RankSize {
    /// Reads rank and size from the environment: `TORCHCOMM_RANK` and `TORCHCOMM_SIZE`, else those
    /// of Open MPI, PMI, PALS, `torchrun`, Slurm, in this order. A pair of which only one half is
    /// set is ignored when a later pair is complete. Slurm's pair is read only in processes that
    /// `srun` has started, not in the script of a batch job.
    ///
    /// Where torchrun has started the process or one of its parents (`TORCHELASTIC_RUN_ID` is set),
    /// its pair comes before those of MPI and PALS, as `mpirun -n 1 torchrun ..` requires. For
    /// `mpirun` in a worker of torchrun, where MPI is the inner launcher, set
    /// `TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD=mpi`.
    ///
    /// `TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD` (`auto`, `mpi`, `pals`, `torchrun`, `slurm`)
    /// restricts the search; every other value restricts it to the first pair.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] when no pair is complete, a value is no number, the rank is not less
    /// than the size, or two pairs disagree and none of these rules chooses between them.
    pub fn from_env() -> Result<Self> {
        Self::from_variables(&variable)
    }

    /// Like [`RankSize::from_env`], but returns `None` if no launcher has set a variable.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] when a launcher's variables are there but not whole or not right.
    pub fn from_env_if_set() -> Result<Option<Self>> {
        Self::find(&variable)
    }

    fn from_variables(variable: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        Self::find(variable)?.ok_or_else(|| {
            Error::bootstrap(
                "neither rank nor size is in the environment; set TORCHCOMM_RANK and \
                 TORCHCOMM_SIZE, or start with `fusewire run`, torchrun, mpirun or srun",
            )
        })
    }

    fn find(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let only = match variable(QUERY_METHOD).map(|method| method.to_ascii_lowercase()) {
            None => None,
            Some(method) => match method.as_str() {
                "auto" => None,
                "mpi" => Some(Method::Mpi),
                "pals" => Some(Method::Pals),
                "torchrun" => Some(Method::Torchrun),
                "slurm" => Some(Method::Slurm),
                _ => Some(Method::Always),
            },
        };
        let mut half = None;
        let mut whole = Vec::new();
        for launcher in &LAUNCHERS {
            if only.is_some_and(|only| launcher.method != only && launcher.method != Method::Always)
            {
                continue;
            }
            if launcher.method == Method::Slurm && variable("SLURM_STEP_ID").is_none() {
                continue;
            }
            match (variable(launcher.rank), variable(launcher.size)) {
                (Some(rank), Some(size)) => whole.push((launcher, rank, size)),
                (None, None) => {}
                (Some(_), None) => half = half.or(Some((launcher.rank, launcher.size))),
                (None, Some(_)) => half = half.or(Some((launcher.size, launcher.rank))),
            }
        }
        let Some((first, rank, size)) = whole.first() else {
            return match half {
                Some((set, unset)) => Err(Error::bootstrap(format!(
                    "{set} is set but {unset} is not; set both"
                ))),
                None => Ok(None),
            };
        };
        if only.is_some() || first.method == Method::Always {
            return first.read(variable, rank, size).map(Some);
        }
        // TORCHELASTIC_RUN_ID is inherited and does not prove that torchrun is the inner launcher:
        // `mpirun` in a worker of torchrun keeps it. torchrun within `mpirun` is the usual case;
        // the other one needs QUERY_METHOD.
        let torchrun = whole
            .iter()
            .find(|(launcher, ..)| launcher.method == Method::Torchrun)
            .filter(|_| variable(TORCHRUN_JOB).is_some());
        if let Some((torchrun, rank, size)) = torchrun {
            return torchrun.read(variable, rank, size).map(Some);
        }
        let found = first.read(variable, rank, size)?;
        for (other, rank, size) in &whole[1..] {
            // A Slurm step is always the outer launcher.
            if other.method != Method::Slurm
                && let Ok(theirs) = other.read(variable, rank, size)
                && (theirs.rank, theirs.size) != (found.rank, found.size)
            {
                return Err(first.contradiction(found, other, theirs));
            }
        }
        Ok(Some(found))
    }
}

impl Launcher {
    /// The error for two launchers whose complete pairs disagree.
    fn contradiction(&self, own: RankSize, other: &Self, theirs: RankSize) -> Error {
        let choices = if self.method == other.method {
            format!("{}, which takes {}", self.method.value(), self.rank)
        } else {
            format!("{} or {}", self.method.value(), other.method.value())
        };
        Error::bootstrap(format!(
            "the environment names two ranks: {}={} of {}={}, and {}={} of {}={}; set \
                {QUERY_METHOD} \
             to {choices}, or remove the variables of the outer launcher",
            self.rank,
            own.rank,
            self.size,
            own.size,
            other.rank,
            theirs.rank,
            other.size,
            theirs.size
        ))
    }

    /// Reads this launcher's variables, given the values of rank and size.
    fn read(
        &self,
        variable: &dyn Fn(&str) -> Option<String>,
        rank: &str,
        size: &str,
    ) -> Result<RankSize> {
        let rank = number(self.rank, rank)?;
        let size = number(self.size, size)?;
        if rank >= size {
            return Err(Error::bootstrap(format!(
                "{}={rank} must be less than {}={size}",
                self.rank, self.size
            )));
        }
        let local = |names: &[&str]| {
            let found = names.iter().find_map(|name| Some((*name, variable(name)?)));
            found.map(|(name, text)| number(name, &text)).transpose()
        };
        Ok(RankSize {
            rank,
            size,
            local_rank: local(self.local_rank)?,
            local_size: match self.method {
                Method::Slurm => variable("SLURM_STEP_NUM_NODES")
                    .or_else(|| variable("SLURM_NNODES"))
                    .is_some_and(|hosts| hosts.trim() == "1")
                    .then_some(size),
                _ => local(self.local_size)?,
            },
        })
    }
}

/// A store found through the environment. On the rank that hosts the server, the server lives as
/// long as this value.
#[derive(Debug)]
pub struct BootstrapStore {
    store: Arc<dyn Store>,
    server: Option<TcpStoreServer>,
}

impl BootstrapStore {
    /// The store.
    pub fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.store)
    }

    /// Returns true if this rank hosts the server. The other ranks must have finished with the
    /// store before this value is dropped.
    pub fn is_host(&self) -> bool {
        self.server.is_some()
    }
}

/// Connects to the TCP store at `MASTER_ADDR` and `MASTER_PORT`. Rank 0 also hosts the server,
/// unless `TORCHELASTIC_USE_AGENT_STORE` is `True`: then the launcher's agent hosts it, and each
/// attempt of a job (`TORCHELASTIC_RESTART_COUNT`) has keys of its own. `timeout` bounds the
/// connection and each later answer.
///
/// A store that rank 0 hosts ends with rank 0's value, also for ranks that have connected to it for
/// a next rendezvous already: call this once if rank 0 hosts, and use the store for every
/// rendezvous.
///
/// On other ranks than the first, the client also joins as a worker, for which a master of PyTorch
/// on rank 0 may wait ([`TcpStore::join_as_worker`]).
///
/// Where neither variable is set, and Open MPI, Hydra (MPICH, Intel MPI), PMIx or Slurm say that
/// all ranks are on this host, the ranks use a file in a directory of the job in `XDG_RUNTIME_DIR`
/// or `/tmp`. The last rank that opens the file removes its name. All ranks make equally many
/// calls.
///
/// # Errors [`Error::Bootstrap`] when a variable is missing or wrong, the port cannot be bound or
/// the directory cannot be made, [`Error::Store`] when no server answers in time.
pub fn store_from_env(rank: u32, size: u32, timeout: Duration) -> Result<BootstrapStore> {
    store_from_variables(&variable, rank, size, timeout)
}

fn store_from_variables(
    variable: &dyn Fn(&str) -> Option<String>,
    rank: u32,
    size: u32,
    timeout: Duration,
) -> Result<BootstrapStore> {
    if rank >= size {
        return Err(Error::bootstrap(format!(
            "rank {rank} must be less than the size, {size}"
        )));
    }
    if variable("MASTER_ADDR").is_none()
        && variable("MASTER_PORT").is_none()
        && is_on_one_host(variable, rank, size)
        && let Some(store) = local::open(variable, size)?
    {
        return Ok(BootstrapStore {
            store: Arc::new(store),
            server: None,
        });
    }
    let need = |name: &str| {
        variable(name).ok_or_else(|| {
            Error::bootstrap(format!(
                "{name} is not set; give the address of rank 0 in MASTER_ADDR and a free port of \
                 it in MASTER_PORT (mpirun -x, mpiexec -genv), start with a launcher that does, or \
                 pass a store"
            ))
        })
    };
    let host = need("MASTER_ADDR")?;
    let host = without_brackets(&host).to_owned();
    let port_text = need("MASTER_PORT")?;
    let port: u16 = port_text
        .trim()
        .parse()
        .ok()
        .filter(|port| *port != 0)
        .ok_or_else(|| {
            Error::bootstrap(format!("MASTER_PORT=\"{port_text}\" is no port number"))
        })?;
    let agent = variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
    let server = if rank == 0 && !agent {
        let server = host_server(variable, &host, port)?;
        let open = !server.wants_secret() && variable(BIND).is_none();
        let one_host = is_on_one_host(variable, rank, size);
        if open && let Some(message) = exposure(&host, server.addresses(), one_host) {
            notice::warn(message);
        }
        Some(server)
    } else {
        None
    };
    let client = TcpStore::connect(host, port, timeout)?;
    if rank != 0 && !agent {
        // Rank 0 may be a process of PyTorch that waits for its workers.
        client.join_as_worker()?;
    }
    let mut store: Arc<dyn Store> = Arc::new(client);
    if agent {
        // The agent's store outlives an attempt that failed.
        let attempt = variable("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
        store = Arc::new(PrefixStore::new(format!("attempt-{attempt}"), store));
    }
    Ok(BootstrapStore { store, server })
}

/// Returns true if the launcher says that all ranks are on this host.
fn is_on_one_host(variable: &dyn Fn(&str) -> Option<String>, rank: u32, size: u32) -> bool {
    let found = RankSize::find(variable).ok().flatten();
    found
        .is_some_and(|found| (found.rank, found.size, found.local_size) == (rank, size, Some(size)))
}

/// Serves the store of rank 0: at `FUSEWIRE_STORE_BIND` if that is set, at all addresses if clients
/// need a secret, else only at the addresses that `MASTER_ADDR` has on this host.
fn host_server(
    variable: &dyn Fn(&str) -> Option<String>,
    host: &str,
    port: u16,
) -> Result<TcpStoreServer> {
    let secret = StoreSecret::from_env();
    let has_secret = secret.is_some();
    let bound = match variable(BIND) {
        Some(address) => TcpStoreServer::bind_with((without_brackets(&address), port), secret),
        None if has_secret => TcpStoreServer::bind_with(("::", port), secret.clone())
            .or_else(|_| TcpStoreServer::bind_with(("0.0.0.0", port), secret)),
        None => TcpStoreServer::bind_with((host, port), None),
    };
    bound.map_err(|error| {
        let busy = matches!(&error, Error::Store { source: Some(source), .. }
            if source.kind() == ErrorKind::AddrInUse);
        let reason = if busy {
            "another process listens there, such as another job or a second rank 0; choose a free \
             port"
                .to_owned()
        } else {
            format!("{error}; choose a free port, or give an address of this host in {BIND}")
        };
        Error::bootstrap(format!(
            "rank 0 cannot listen at MASTER_ADDR={host}, MASTER_PORT={port}: {reason}"
        ))
    })
}

/// Returns a warning for the user of a server without a secret that listens at `addresses`.
/// `one_host` says that all ranks are known to be on this host.
fn exposure(host: &str, addresses: &[SocketAddr], one_host: bool) -> Option<String> {
    let reachable = addresses.iter().find(|address| !address.ip().is_loopback());
    if let Some(address) = reachable {
        return Some(format!(
            "the store listens at {address} without a secret: every process that reaches this \
                address \
             can read and change what the ranks exchange; set FUSEWIRE_STORE_SECRET, equal on all \
             ranks"
        ));
    }
    // A literal loopback address, or "localhost", says that no other host is meant.
    let is_name = host.parse::<IpAddr>().is_err() && !host.starts_with("localhost");
    (is_name && !one_host).then(|| {
        format!(
            "MASTER_ADDR={host} is {} on this host, so the store listens there only, and ranks on \
                other \
             hosts cannot connect; if there are any, give an address that they reach in {BIND}, or \
             set FUSEWIRE_STORE_SECRET, equal on all ranks",
            addresses[0].ip()
        )
    })
}

/// Returns an address without the brackets that IPv6 addresses have in front of a port.
fn without_brackets(address: &str) -> &str {
    let address = address.trim();
    let inner = address
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    inner.unwrap_or(address)
}

/// Names the host that this process runs on: two ranks with equal names can pass descriptors of
/// memory to each other. `FUSEWIRE_HOST_ID` overrides; else it is the kernel's boot id.
///
/// # Errors
/// [`Error::Bootstrap`] when the boot id cannot be read and `FUSEWIRE_HOST_ID` is not set.
pub fn host_id() -> Result<String> {
    const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
    if let Some(id) = variable("FUSEWIRE_HOST_ID") {
        return Ok(id);
    }
    let id = fs::read_to_string(BOOT_ID).map_err(|error| {
        Error::bootstrap(format!(
            "{BOOT_ID} cannot be read ({error}); set FUSEWIRE_HOST_ID"
        ))
    })?;
    Ok(id.trim().to_owned())
}

/// Returns the value of `FUSEWIRE_NVLINK_DOMAIN`: a name, or an empty string for no domain.
/// Returns `None` if the variable is not set.
///
/// # Errors
/// [`Error::Bootstrap`] for a name that is no Unicode or longer than 256 bytes.
#[cfg_attr(
    not(feature = "cuda"),
    expect(dead_code, reason = "asked by NVIDIA GPUs alone")
)]
pub(crate) fn nvlink_domain() -> Result<Option<String>> {
    const NAME: &str = "FUSEWIRE_NVLINK_DOMAIN";
    match env::var(NAME) {
        Ok(name) if name.len() <= 256 => Ok(Some(name)),
        Err(env::VarError::NotPresent) => Ok(None),
        _ => Err(Error::bootstrap(format!(
            "{NAME} is no name of an NVLink domain: it has more than 256 bytes, or is not Unicode"
        ))),
    }
}

/// A variable that is set and not empty.
fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

fn number(name: &str, text: &str) -> Result<u32> {
    text.trim()
        .parse()
        .map_err(|_| Error::bootstrap(format!("{name}=\"{text}\" is no number of a rank or size")))
}
