//! Determines rank, size, store and host from environment variables.
//!
//! The variables and their precedence are those of torchcomms (`comms/torchcomms/utils/Utils.cpp`).
//! A program therefore runs under `torchrun` and `fusewire run` without further settings. Under
//! `mpirun`, `srun` and PALS, set the store's address in `MASTER_ADDR` and `MASTER_PORT`, unless
//! all ranks are on one host.
//!
//! | variable | meaning |
//! |---|---|
//! | `MASTER_ADDR`, `MASTER_PORT` | address and port at which rank 0 or the agent serves the store |
//! | `FUSEWIRE_STORE_SECRET` | secret shared by server and clients; excludes PyTorch clients |
//! | `FUSEWIRE_STORE_BIND` | address on which rank 0 listens; default: see below |
//! | `FUSEWIRE_STORE_PROTOCOL` | `auto` (default), `current` or `legacy` (PyTorch before 2.1) |
//! | `FUSEWIRE_HOST_ID` | name of this host; default: the kernel's boot id |
//! | `FUSEWIRE_NVLINK_DOMAIN` | NVLink domain of this host's GPUs; default: reported by NVML |
//!
//! A launcher such as `torchrun` runs an agent on each host: the process that starts the host's
//! ranks. An empty `FUSEWIRE_NVLINK_DOMAIN` means that the GPUs are in no NVLink domain. Without
//! `FUSEWIRE_STORE_BIND`, rank 0 listens on all addresses if a secret is set, and otherwise only on
//! the addresses to which `MASTER_ADDR` resolves.

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
use crate::{Error, Result};

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
    /// Names of variables with the rank's index on its host. The first variable that is set is
    /// used.
    local_rank: &'static [&'static str],
    local_size: &'static [&'static str],
}

/// Launchers to which `TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD` can restrict the search.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Method {
    /// No launcher: `TORCHCOMM_RANK` and `TORCHCOMM_SIZE`, which are never excluded from the
    /// search.
    Always,
    Mpi,
    Pals,
    Torchrun,
    Slurm,
}

/// Launchers in order of precedence: torchcomms' order, followed by Slurm. [`RankSize::from_env`]
/// documents the exceptions. Slurm is last, because processes that `torchrun` or `fusewire run`
/// starts within a Slurm step also inherit Slurm's variables.
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
        // Slurm reports the number of ranks on a host only in a list for all hosts, so
        // `Launcher::read` sets the local size only if all ranks are on one host.
        local_size: &[],
    },
];

/// Variable with the address on which rank 0's store listens. If the variable is not set,
/// `MASTER_ADDR` determines the address.
const BIND: &str = "FUSEWIRE_STORE_BIND";

/// Variable that restricts the search for rank and size to one launcher.
pub(crate) const QUERY_METHOD: &str = "TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD";

/// Variable that torchrun and `fusewire run` set for every process that they start. Child processes
/// of these processes inherit the variable.
const TORCHRUN_JOB: &str = "TORCHELASTIC_RUN_ID";

impl Method {
    /// Returns the value of [`QUERY_METHOD`] that selects this method.
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
    /// Reads rank and size from the environment: from `TORCHCOMM_RANK` and `TORCHCOMM_SIZE`, or
    /// else from the variables of Open MPI, PMI, PALS, `torchrun` and Slurm, in this order. If a
    /// launcher has set only one of its two variables, that pair is ignored, provided that another
    /// launcher's pair is complete. Slurm's pair is read only in processes that `srun` has started,
    /// not in the script of a batch job.
    ///
    /// If `TORCHELASTIC_RUN_ID` is set, torchrun has started the process or one of its ancestors.
    /// The pair of torchrun then takes precedence over those of MPI and PALS, as `mpirun -n 1
    /// torchrun ..` requires. If a worker of torchrun starts `mpirun`, MPI is the inner launcher:
    /// set `TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD=mpi`.
    ///
    /// `TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD` (`mpi`, `pals`, `torchrun` or `slurm`) restricts
    /// the search to `TORCHCOMM_RANK` and `TORCHCOMM_SIZE` and to the variables of the named
    /// launcher. `auto` does not restrict the search. Any other value restricts it to
    /// `TORCHCOMM_RANK` and `TORCHCOMM_SIZE`.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] if no pair is complete, if a value is not a number, if the rank is not
    /// less than the size, or if two pairs disagree and none of these rules chooses between them.
    pub fn from_env() -> Result<Self> {
        Self::from_variables(&variable)
    }

    /// Like [`RankSize::from_env`], but returns `None` if no launcher has set a variable.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] if the variables that are set are incomplete, invalid or contradictory.
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
        // TORCHELASTIC_RUN_ID does not prove that torchrun is the inner launcher: if a worker of
        // torchrun starts `mpirun`, the MPI ranks inherit the variable. torchrun within `mpirun` is
        // the usual case. `mpirun` within torchrun requires QUERY_METHOD.
        let torchrun = whole
            .iter()
            .find(|(launcher, ..)| launcher.method == Method::Torchrun)
            .filter(|_| variable(TORCHRUN_JOB).is_some());
        if let Some((torchrun, rank, size)) = torchrun {
            return torchrun.read(variable, rank, size).map(Some);
        }
        let found = first.read(variable, rank, size)?;
        for (other, rank, size) in &whole[1..] {
            // Slurm is always the outer launcher, so its rank and size may differ.
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
    /// Returns the error for two launchers whose complete pairs disagree.
    fn contradiction(&self, own: RankSize, other: &Self, theirs: RankSize) -> Error {
        let choices = if self.method == other.method {
            format!("{}, which takes {}", self.method.value(), self.rank)
        } else {
            format!("{} or {}", self.method.value(), other.method.value())
        };
        Error::bootstrap(format!(
            "the environment names two ranks: {}={} of {}={}, and {}={} of {}={}; set \
             {QUERY_METHOD} to {choices}, or remove the variables of the outer launcher",
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

    /// Parses `rank` and `size`, the values of this launcher's variables, and reads the local rank
    /// and local size.
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

/// Store that the environment variables specify. If this rank hosts the server, dropping this value
/// stops the server.
#[derive(Debug)]
pub struct BootstrapStore {
    store: Arc<dyn Store>,
    server: Option<TcpStoreServer>,
}

impl BootstrapStore {
    /// Returns the store.
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
/// unless `TORCHELASTIC_USE_AGENT_STORE` is `True`. If it is `True`, the launcher's agent hosts the
/// server, and each attempt of a job (`TORCHELASTIC_RESTART_COUNT`) uses separate keys. `timeout`
/// limits the time for the connection and for each later answer.
///
/// If rank 0 hosts the server, the server stops when rank 0 drops the returned value, even if other
/// ranks have already connected for another rendezvous. Call this function only once, and use the
/// store for every rendezvous.
///
/// If the launcher has no agent that hosts the server, the clients of all ranks except rank 0 join
/// as workers, because rank 0 may be a PyTorch process, whose store waits for its workers
/// ([`TcpStore::join_as_worker`]).
///
/// The store is a file if neither `MASTER_ADDR` nor `MASTER_PORT` is set, all ranks are on this
/// host according to the launcher, and the job can be identified (under Open MPI, PMIx, PALS,
/// Slurm, and Hydra, the launcher of MPICH and Intel MPI). The file is in a job-specific directory
/// in `XDG_RUNTIME_DIR` or `/tmp`. The last rank that opens the file removes the file's name. All
/// ranks must call this function the same number of times.
///
/// # Errors
/// [`Error::Bootstrap`] if a variable is missing or invalid, if the port cannot be bound, or if the
/// directory cannot be created. [`Error::Store`] if no server answers in time.
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
            crate::store::notice::warn(message);
        }
        Some(server)
    } else {
        None
    };
    let client = TcpStore::connect(host, port, timeout)?;
    if rank != 0 && !agent {
        // Rank 0 may be a PyTorch process, whose store waits for its workers.
        client.join_as_worker()?;
    }
    let mut store: Arc<dyn Store> = Arc::new(client);
    if agent {
        // The agent's store keeps the keys of failed attempts, so each attempt uses a separate
        // prefix.
        let attempt = variable("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
        store = Arc::new(PrefixStore::new(format!("attempt-{attempt}"), store));
    }
    Ok(BootstrapStore { store, server })
}

/// Returns true if all ranks are on this host according to the launcher's variables.
fn is_on_one_host(variable: &dyn Fn(&str) -> Option<String>, rank: u32, size: u32) -> bool {
    let found = RankSize::find(variable).ok().flatten();
    found
        .is_some_and(|found| (found.rank, found.size, found.local_size) == (rank, size, Some(size)))
}

/// Starts the store's server on rank 0. The server listens on `FUSEWIRE_STORE_BIND` if set,
/// otherwise on all addresses if clients need a secret, and otherwise only on the addresses to
/// which `MASTER_ADDR` resolves on this host.
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
        let reason = if error.kind() == Some(ErrorKind::AddrInUse) {
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

/// Returns a warning for the user about a server without a secret that listens on `addresses`, if
/// other hosts can reach the server, or if ranks on other hosts may be unable to connect to it.
/// `one_host` is true if all ranks are known to be on this host.
fn exposure(host: &str, addresses: &[SocketAddr], one_host: bool) -> Option<String> {
    let reachable = addresses.iter().find(|address| !address.ip().is_loopback());
    if let Some(address) = reachable {
        return Some(format!(
            "the store listens at {address} without a secret: every process that reaches this \
             address can read and change what the ranks exchange; set FUSEWIRE_STORE_SECRET, equal \
             on all ranks"
        ));
    }
    // A literal loopback address or "localhost" shows that the user expects no ranks on other
    // hosts.
    let is_name = host.parse::<IpAddr>().is_err() && !host.starts_with("localhost");
    (is_name && !one_host).then(|| {
        format!(
            "MASTER_ADDR={host} is {} on this host, so the store listens there only, and ranks on \
             other hosts cannot connect; if there are any, give an address that they reach in \
             {BIND}, or set FUSEWIRE_STORE_SECRET, equal on all ranks",
            addresses[0].ip()
        )
    })
}

/// Returns `address` without the brackets that enclose an IPv6 address in front of a port.
fn without_brackets(address: &str) -> &str {
    let address = address.trim();
    let inner = address
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    inner.unwrap_or(address)
}

/// Returns the name of this host: `FUSEWIRE_HOST_ID` if set, otherwise the kernel's boot id. Ranks
/// whose hosts have equal names can pass descriptors of memory to each other.
///
/// # Errors
/// [`Error::Bootstrap`] if `FUSEWIRE_HOST_ID` is not set and the boot id cannot be read.
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

/// Returns the value of an environment variable, or `None` if the variable is unset or empty.
fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

fn number(name: &str, text: &str) -> Result<u32> {
    text.trim()
        .parse()
        .map_err(|_| Error::bootstrap(format!("{name}=\"{text}\" is no number of a rank or size")))
}
