//! Communicators over several hosts: Fusewire's kernels within each host, Gloo between hosts.
//!
//! The ranks of a host form a local communicator. One Gloo context connects all ranks. If all hosts
//! have the same number of ranks, a second Gloo context connects *peers*: the ranks with the same
//! local rank on different hosts. Otherwise only the first ranks of the hosts are peers. Reductions
//! with [`Determinism::Bitwise`] use [`ordered`], and other reductions use [`levels`].
//!
//! If an operation fails on the local communicator or in a Gloo context, the call of the backend
//! fails. The communicator then aborts the backend, which aborts the local communicator and the
//! Gloo contexts.

mod levels;
mod ordered;
mod point;
mod route;

use core::fmt;
use core::time::Duration;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use fusewire_device::DType;
use fusewire_device::layout::FailureKind;

use self::route::HierarchyRoute;
use crate::backend::gloo::{Gloo, GlooCall, Message};
use crate::backend::{
    Backend, CallArgs, ONLY_KERNELS, Reach, Route, Setup, backend_error, compose,
};
use crate::collective::{Op, Operands};
use crate::comm::Communicator;
use crate::options::Determinism;
use crate::store::{PrefixStore, Store};
use crate::{Error, Result};

const NAME: &str = "fusewire";

/// Time that is added to the timeouts of waits for ranks of the same host. If one of these ranks
/// waits for another host at the same time, its wait times out first and reports the more precise
/// error.
const GRACE: Duration = Duration::from_millis(500);

/// Longest timeout of a call. A longer one would overflow the clock.
const LONGEST: Duration = Duration::from_secs(1 << 30);

/// Position of a rank: its host, and its index on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Coordinates {
    host: u32,
    /// Index among the ranks of the host.
    local: u32,
}

/// This rank's part of a communicator over several hosts.
pub(crate) struct Hierarchy {
    rank: u32,
    /// Communicator of this host's ranks.
    local: Communicator,
    /// Position of each rank.
    coordinates: Vec<Coordinates>,
    /// Ranks of each host.
    hosts: Vec<Vec<u32>>,
    /// Gloo context of all ranks.
    all: Gloo,
    /// Gloo context of this rank and its peers. In this context, a rank's number is the index of
    /// its host. `None` if this rank has no peers.
    peers: Option<Gloo>,
    determinism: Determinism,
    /// Messages of the open group, if a group is open.
    group: Mutex<Option<Vec<Message>>>,
}

impl fmt::Debug for Hierarchy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hierarchy")
            .field("rank", &self.rank)
            .field("hosts", &self.hosts)
            .finish_non_exhaustive()
    }
}

/// Arguments and deadline of one call. All steps of the call share the deadline.
#[derive(Clone, Copy)]
struct Clock {
    args: GlooCall,
    until: Instant,
}

impl Clock {
    fn start(op: &Op, args: &CallArgs) -> Self {
        Self {
            args: GlooCall::new(op, args),
            until: Instant::now() + args.timeout.min(LONGEST),
        }
    }

    /// Returns the call's arguments with the remaining time.
    fn args(&self) -> GlooCall {
        let left = self.until.saturating_duration_since(Instant::now());
        GlooCall {
            timeout: left.max(Duration::from_millis(1)),
            ..self.args
        }
    }

    fn bytes(&self, count: usize) -> usize {
        self.args.bytes(count)
    }
}

/// Allocates at least `bytes` zeroed bytes, aligned for every element type.
fn scratch(bytes: usize) -> Vec<u64> {
    vec![0; bytes.div_ceil(8)]
}

impl Hierarchy {
    /// Connects the hosts. `here` lists the ranks of this host, in the order of their local ranks.
    /// All ranks call this function.
    pub(crate) fn new(setup: &Setup, local: Communicator, here: Vec<u32>) -> Result<Self> {
        let timeout = setup.options.timeout;
        let connect = |part: &str, rank: u32, size: u32| {
            let store: Arc<dyn Store> = Arc::new(PrefixStore::new(
                format!("between/{part}"),
                Arc::clone(&setup.store),
            ));
            Gloo::connect(rank, size, store, &setup.options, Reach::Network)
        };
        let all = connect("all", setup.rank, setup.size)?;
        // The first rank of a host identifies the host.
        let first = here.first().copied().unwrap_or(setup.rank);
        let mut firsts = vec![0u32; setup.size as usize];
        let args = GlooCall {
            dtype: DType::U32,
            timeout,
        };
        // SAFETY: `first` is one u32, and `firsts` holds one u32 per rank.
        unsafe {
            all.all_gather(
                (&raw const first).cast(),
                firsts.as_mut_ptr().cast(),
                1,
                &args,
            )?
        };
        let (coordinates, hosts) = coordinates(&firsts).ok_or_else(|| Error::Communicator {
            name: setup.name.clone(),
            detail: format!(
                "the ranks disagree about the hosts that they are on: {firsts:?}; check \
                 FUSEWIRE_HOST_ID"
            ),
        })?;
        let own = coordinates[setup.rank as usize];
        let peers = (own.local == 0 || is_even(&hosts))
            .then(|| {
                let part = format!("peers-{}", own.local);
                connect(&part, own.host, hosts.len() as u32)
            })
            .transpose()?;
        Ok(Self {
            rank: setup.rank,
            local,
            coordinates,
            hosts,
            all,
            peers,
            determinism: setup.options.determinism,
            group: Mutex::default(),
        })
    }

    fn own(&self) -> Coordinates {
        self.coordinates[self.rank as usize]
    }

    /// Returns the number of ranks on this host.
    fn here(&self) -> u32 {
        self.local.size()
    }

    fn host_count(&self) -> u32 {
        self.hosts.len() as u32
    }

    fn is_even(&self) -> bool {
        is_even(&self.hosts)
    }

    /// Returns the communicator of this host, with the remaining time of the call plus [`GRACE`] as
    /// its timeout.
    fn local(&self, clock: &Clock) -> Communicator {
        self.local.with_timeout(clock.args().timeout + GRACE)
    }

    /// Returns a function that wraps an error of the local communicator. The new error also lists
    /// the ranks of this host.
    fn here_failed(&self, operation: &'static str) -> impl Fn(Error) -> Error {
        move |error| {
            let why = match &error {
                Error::Failed(failure)
                    if matches!(failure.kind, FailureKind::Abort | FailureKind::Stopped) =>
                {
                    " (one of them has failed, perhaps in communication with other hosts; see its \
                     error)"
                }
                _ => "",
            };
            let detail = format!(
                "among the ranks of this host ({:?}; the error numbers them from 0): {error}{why}",
                self.hosts[self.own().host as usize]
            );
            backend_error(NAME, operation, detail)
        }
    }

    /// Returns a function that wraps an error of the Gloo context of all ranks. The new error also
    /// names this rank.
    fn between_failed(&self, operation: &'static str) -> impl Fn(Error) -> Error {
        move |error| {
            let detail = format!(
                "rank {} of {}, between hosts: {error}",
                self.rank,
                self.size()
            );
            backend_error(NAME, operation, detail)
        }
    }

    /// Returns a function that wraps an error of the peers' Gloo context. The new error also lists
    /// the peers, because this context numbers them by host.
    fn peers_failed(&self, operation: &'static str) -> impl Fn(Error) -> Error {
        move |error| {
            let peers: Vec<u32> = self.hosts.iter().map(|ranks| self.peer_of(ranks)).collect();
            let detail = format!(
                "rank {}, between hosts (ranks {peers:?}; the error numbers them from 0): {error}",
                self.rank
            );
            backend_error(NAME, operation, detail)
        }
    }

    /// Returns this rank's peer on the host whose ranks are `ranks`.
    fn peer_of(&self, ranks: &[u32]) -> u32 {
        ranks[if self.is_even() {
            self.own().local as usize
        } else {
            0
        }]
    }

    fn choose_route(&self, op: &Op) -> HierarchyRoute {
        route::choose(
            op,
            &route::Topology {
                bitwise: self.determinism == Determinism::Bitwise,
                even: self.is_even(),
                alone: self.hosts.iter().all(|ranks| ranks.len() == 1),
            },
        )
    }

    /// Reduces on all ranks.
    ///
    /// # Safety
    /// The preconditions of [`Backend::execute`].
    unsafe fn all_reduce(
        &self,
        route: HierarchyRoute,
        operands: &Operands<'_>,
        count: usize,
        clock: &Clock,
    ) -> Result<()> {
        let (from, to) = (operands.input().as_ptr(), operands.output().as_mut_ptr());
        let reduce = operands.reduction();
        // SAFETY: every route has the preconditions of this method.
        unsafe {
            match route {
                HierarchyRoute::Gathered => {
                    self.reduce_gathered(from, to, count, reduce, None, clock)
                }
                HierarchyRoute::Ordered => self.all_reduce_ordered(from, to, count, reduce, clock),
                HierarchyRoute::Shards => self.all_reduce_shards(from, to, count, reduce, clock),
                HierarchyRoute::Leaders => self.all_reduce_leaders(from, to, count, reduce, clock),
                HierarchyRoute::Flat | HierarchyRoute::Messages => self
                    .all
                    .all_reduce(from, to, count, reduce, &clock.args())
                    .map_err(self.between_failed("all_reduce")),
            }
        }
    }

    /// Reduces to `root`.
    ///
    /// # Safety
    /// The preconditions of [`Backend::execute`].
    unsafe fn reduce(
        &self,
        route: HierarchyRoute,
        operands: &Operands<'_>,
        (count, root): (usize, u32),
        clock: &Clock,
    ) -> Result<()> {
        let (from, to) = (operands.input().as_ptr(), operands.output().as_mut_ptr());
        let reduce = operands.reduction();
        // SAFETY: every route has the preconditions of this method.
        unsafe {
            match route {
                HierarchyRoute::Gathered => {
                    self.reduce_gathered(from, to, count, reduce, Some(root), clock)
                }
                HierarchyRoute::Ordered => {
                    self.reduce_ordered(from, to, count, reduce, root, clock)
                }
                HierarchyRoute::Leaders => {
                    self.reduce_leaders(from, to, count, reduce, root, clock)
                }
                _ => self
                    .all
                    .reduce(from, to, count, reduce, root, &clock.args())
                    .map_err(self.between_failed("reduce")),
            }
        }
    }
}

/// Computes the position of each rank and the ranks of each host. `firsts` gives, for each rank,
/// the first rank on the same host.
fn coordinates(firsts: &[u32]) -> Option<(Vec<Coordinates>, Vec<Vec<u32>>)> {
    let (mut coordinates, mut hosts) = (Vec::new(), Vec::<Vec<u32>>::new());
    for (rank, first) in (0u32..).zip(firsts) {
        let host = match hosts.iter().position(|ranks| ranks[0] == *first) {
            Some(host) => host,
            None if *first == rank => {
                hosts.push(Vec::new());
                hosts.len() - 1
            }
            None => return None,
        };
        coordinates.push(Coordinates {
            host: host as u32,
            local: hosts[host].len() as u32,
        });
        hosts[host].push(rank);
    }
    Some((coordinates, hosts))
}

fn is_even(hosts: &[Vec<u32>]) -> bool {
    hosts.iter().all(|ranks| ranks.len() == hosts[0].len())
}

impl Backend for Hierarchy {
    fn name(&self) -> &str {
        NAME
    }

    fn version(&self) -> String {
        let own = env!("CARGO_PKG_VERSION");
        format!("{own}, kernels on each host, gloo between")
    }

    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.coordinates.len() as u32
    }

    fn supports(&self, op: &Op) -> bool {
        if op.is_fused() {
            return false;
        }
        match (op.dtype(), op.reduction()) {
            (Some(dtype), Some(code)) => code.supports(dtype),
            _ => true,
        }
    }

    fn is_bitwise(&self) -> bool {
        self.determinism == Determinism::Bitwise
    }

    fn route(&self, op: &Op) -> Option<Route> {
        let route = self.choose_route(op);
        Some(Route::new(self.host_count(), route.why(op)))
    }

    fn group_start(&self) -> Result<()> {
        self.start_group()
    }

    fn group_end(&self) -> Result<()> {
        self.end_group()
    }

    unsafe fn execute(&self, op: &Op, operands: &Operands<'_>, args: &CallArgs) -> Result<()> {
        let (from, to) = (operands.input().as_ptr(), operands.output().as_mut_ptr());
        let (reduce, clock) = (operands.reduction(), Clock::start(op, args));
        let route = self.choose_route(op);
        // SAFETY: every route, and `by_messages`, has the preconditions of `Backend::execute`.
        unsafe {
            match *op {
                Op::AllReduce { count, .. } => self.all_reduce(route, operands, count, &clock),
                Op::Reduce { count, root, .. } => {
                    self.reduce(route, operands, (count, root), &clock)
                }
                Op::ReduceScatter { count, .. } if route == HierarchyRoute::Shards => {
                    self.reduce_scatter_shards(from, to, count, reduce, &clock)
                }
                Op::ReduceScatter { count, .. } => {
                    self.reduce_scatter_ordered(from, to, count, reduce, &clock)
                }
                Op::Broadcast { count, root, .. } if route == HierarchyRoute::Leaders => {
                    self.broadcast_leaders(to, count, root, &clock)
                }
                Op::Broadcast { count, root, .. } => self
                    .all
                    .broadcast(to, count, root, &clock.args())
                    .map_err(self.between_failed("broadcast")),
                Op::AllGather { count, .. } if route == HierarchyRoute::Shards => {
                    self.all_gather_shards(from, to, count, &clock)
                }
                Op::AllGather { count, .. } => self
                    .all
                    .all_gather(from, to, count, &clock.args())
                    .map_err(self.between_failed("all_gather")),
                Op::AllToAll { .. }
                | Op::AllToAllV { .. }
                | Op::AllGatherV { .. }
                | Op::Scatter { .. }
                | Op::Gather { .. } => compose::by_messages(self, op, operands, args),
                Op::Send { peer, .. } => self.message(Message::send(op, from, peer, args), "send"),
                Op::Recv { peer, .. } => self.message(Message::recv(op, to, peer, args), "recv"),
                Op::Barrier => self
                    .all
                    .barrier(args.timeout)
                    .map_err(self.between_failed("barrier")),
                Op::AllGatherWithFlags { .. }
                | Op::ReduceScatterOnArrival { .. }
                | Op::AllReduceNorm { .. }
                | Op::ReduceScatterNorm { .. }
                | Op::VocabParallel { .. } => Err(backend_error(NAME, op.name(), ONLY_KERNELS)),
            }
        }
    }

    fn abort(&self) {
        self.all.abort();
        if let Some(peers) = &self.peers {
            peers.abort();
        }
        self.local.abort();
    }

    fn async_error(&self) -> Result<()> {
        self.local
            .failure()
            .map_or(Ok(()), |error| Err(self.here_failed("communicator")(error)))
    }
}

impl Drop for Hierarchy {
    fn drop(&mut self) {
        // The stream is idle, because every call blocks until its work has completed. The result is
        // ignored, because the calls have already returned their failures.
        let _ = self.local.finalize();
    }
}

#[cfg(test)]
mod tests {
    use super::{Coordinates, coordinates, is_even};

    #[test]
    fn places_come_from_the_first_ranks() {
        let (found, hosts) = coordinates(&[0, 1, 0, 1, 4]).expect("they agree");
        let expected = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0)];
        let expected = expected.map(|(host, local)| Coordinates { host, local });
        assert_eq!(found, expected);
        assert_eq!(hosts, [vec![0, 2], vec![1, 3], vec![4]]);
        assert!(!is_even(&hosts) && is_even(&hosts[..2]));
        assert_eq!(coordinates(&[0, 2, 2]), None);
    }
}
