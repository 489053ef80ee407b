//! Choice of the provider for a pair of processes.

use core::fmt;
use core::str::FromStr;
use std::env;

use serde::{Deserialize, Serialize};

use crate::provider::Provider;
use crate::{Error, LinkLayer, Result, SharedMemory, Tcp, Transport, TransportFailure, Verbs};

/// Environment variable that forces a route.
const VARIABLE: &str = "FUSEWIRE_TRANSPORT";

/// Kind of connection between two processes, from the fastest to the slowest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Route {
    /// Memory that both processes map: [`SharedMemory`].
    SharedMemory,
    /// RDMA: [`Verbs`].
    Verbs,
    /// [`Tcp`].
    Tcp,
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SharedMemory => "shm",
            Self::Verbs => "verbs",
            Self::Tcp => "tcp",
        })
    }
}

impl FromStr for Route {
    type Err = Error;

    /// Parses `shm`, `verbs` or `tcp`.
    fn from_str(text: &str) -> Result<Self> {
        let routes = [Self::SharedMemory, Self::Verbs, Self::Tcp];
        let found = routes.into_iter().find(|route| route.to_string() == text);
        found.ok_or_else(|| Error::InvalidArgument {
            operation: "transport route",
            detail: format!("{text:?} is not shm, verbs or tcp"),
        })
    }
}

/// Properties of a process that determine its routes to other processes. Processes exchange them
/// through a store, for example as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint {
    host: String,
    user: u32,
    /// Kind of the RDMA network, if the process can use one.
    rdma: Option<Fabric>,
    /// Reason why the process can use no RDMA device.
    without_rdma: String,
    has_tcp: bool,
    forced: Option<Route>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Fabric {
    InfiniBand,
    Ethernet,
}

/// Creates transports to peers, with the fastest provider that both sides support.
///
/// ```
/// use core::time::Duration;
/// use fusewire_net::{Connector, Notify, Memory};
///
/// let second = Duration::from_secs(1);
/// // Two processes. The names of their hosts are equal if they run on the same host.
/// let (a, b) = (Connector::new("host-7")?, Connector::new("host-7")?);
/// // They exchange their endpoints, and later their URLs, through a store.
/// let (to_b, to_a) = (a.transport(b.endpoint())?, b.transport(a.endpoint())?);
/// assert_eq!(a.route(b.endpoint())?.to_string(), "shm");
/// let (url_a, url_b) = (to_b.bind()?, to_a.bind()?);
/// to_b.connect(&url_b, second)?;
/// to_a.connect(&url_a, second)?;
/// # Ok::<(), fusewire_net::Error>(())
/// ```
#[derive(Debug)]
pub struct Connector {
    endpoint: Endpoint,
    verbs: Verbs,
    tcp: Option<Tcp>,
}

impl Connector {
    /// Creates a connector that uses the first active RDMA port and the automatic network
    /// interface. `host` names this host; processes with equal names share memory. The environment
    /// variable `FUSEWIRE_TRANSPORT` (`shm`, `verbs` or `tcp`) forces a route.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the variable has another value.
    pub fn new(host: &str) -> Result<Self> {
        let forced = env::var(VARIABLE).ok().filter(|value| !value.is_empty());
        let forced = forced.map(|value| value.parse()).transpose()?;
        Ok(Self::with(
            host,
            Verbs::new(),
            Tcp::automatic().ok(),
            forced,
        ))
    }

    /// Creates a connector with these providers. If `forced` is `Some`, it uses no other route.
    pub fn with(host: &str, verbs: Verbs, tcp: Option<Tcp>, forced: Option<Route>) -> Self {
        let rdma = verbs.link_layer();
        let endpoint = Endpoint {
            host: host.to_owned(),
            // SAFETY: the call has no preconditions.
            user: unsafe { libc::geteuid() },
            rdma: rdma.as_ref().ok().map(|layer| match layer {
                LinkLayer::InfiniBand => Fabric::InfiniBand,
                LinkLayer::Ethernet => Fabric::Ethernet,
            }),
            without_rdma: rdma
                .err()
                .map(|error| error.to_string())
                .unwrap_or_default(),
            has_tcp: tcp.is_some_and(|tcp| tcp.supported()),
            forced,
        };
        Self {
            endpoint,
            verbs,
            tcp,
        }
    }

    /// Returns the properties of this process.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Returns the route to a peer. Both sides compute the same route.
    ///
    /// # Errors
    /// [`Error::Call`] of kind `Connect` if both sides have no common route, or force different
    /// ones. The message names the side that lacks the forced route.
    pub fn route(&self, peer: &Endpoint) -> Result<Route> {
        self.endpoint.route(peer)
    }

    /// Creates a transport to a peer, which is not bound.
    ///
    /// # Errors
    /// The errors of [`Connector::route`].
    pub fn transport(&self, peer: &Endpoint) -> Result<Transport> {
        Ok(match (self.route(peer)?, self.tcp) {
            (Route::SharedMemory, _) => Transport::new(SharedMemory),
            (Route::Verbs, _) => Transport::new(self.verbs.clone()),
            (Route::Tcp, tcp) => Transport::new(tcp.unwrap_or_else(Tcp::local)),
        })
    }
}

impl Endpoint {
    fn route(&self, peer: &Self) -> Result<Route> {
        let refused = |detail: String| Error::Call {
            operation: "choose a route",
            peer: format!("a process on host {}", peer.host),
            kind: TransportFailure::Connect,
            detail,
        };
        let forced = match (self.forced, peer.forced) {
            (Some(own), Some(theirs)) if own != theirs => {
                return Err(refused(format!(
                    "this side forces {own}, the peer {theirs}; set {VARIABLE} equally on all hosts"
                )));
            }
            (own, theirs) => own.or(theirs),
        };
        let routes = match forced {
            Some(route) => vec![route],
            None => vec![Route::SharedMemory, Route::Verbs, Route::Tcp],
        };
        let mut obstacles = Vec::new();
        for route in routes {
            match self.obstacle(peer, route) {
                None => return Ok(route),
                Some(obstacle) => obstacles.push(format!("{route}: {obstacle}")),
            }
        }
        Err(refused(obstacles.join("; ")))
    }

    /// Returns the reason why the two processes cannot use a route.
    fn obstacle(&self, peer: &Self, route: Route) -> Option<String> {
        match route {
            Route::SharedMemory if self.host != peer.host => {
                Some(format!("this side runs on host {}", self.host))
            }
            Route::SharedMemory if self.user != peer.user => Some(format!(
                "this side runs as user {}, the peer as user {}",
                self.user, peer.user
            )),
            Route::SharedMemory => None,
            Route::Verbs => match (self.rdma, peer.rdma) {
                (Some(own), Some(theirs)) if own == theirs => None,
                (Some(own), Some(theirs)) => Some(format!(
                    "this side has an {own:?} port, the peer an {theirs:?} port"
                )),
                (None, _) => Some(format!("this side: {}", self.without_rdma)),
                (_, None) => Some(format!("the peer: {}", peer.without_rdma)),
            },
            Route::Tcp if !self.has_tcp => Some("this side has no network interface".to_owned()),
            Route::Tcp if !peer.has_tcp => Some("the peer has no network interface".to_owned()),
            Route::Tcp => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(host: &str, rdma: Option<Fabric>) -> Endpoint {
        Endpoint {
            host: host.to_owned(),
            user: 1000,
            rdma,
            without_rdma: "no active port".to_owned(),
            has_tcp: true,
            forced: None,
        }
    }

    /// Returns the route, which must be the same in both directions, or the error of the first
    /// side.
    fn route(a: &Endpoint, b: &Endpoint) -> Result<Route, String> {
        let there = a.route(b).map_err(|error| error.to_string());
        assert_eq!(there.as_ref().ok(), b.route(a).ok().as_ref());
        there
    }

    #[test]
    fn the_fastest_common_route_is_chosen() {
        let (ib, roce) = (Some(Fabric::InfiniBand), Some(Fabric::Ethernet));
        let a = endpoint("a", ib);
        assert_eq!(route(&a, &endpoint("a", None)), Ok(Route::SharedMemory));
        assert_eq!(route(&a, &endpoint("b", ib)), Ok(Route::Verbs));
        assert_eq!(route(&a, &endpoint("b", roce)), Ok(Route::Tcp));
        assert_eq!(route(&a, &endpoint("b", None)), Ok(Route::Tcp));
        let other_user = Endpoint {
            user: 1001,
            ..endpoint("a", ib)
        };
        assert_eq!(route(&a, &other_user), Ok(Route::Verbs));
        let isolated = Endpoint {
            has_tcp: false,
            ..endpoint("b", roce)
        };
        let error = route(&a, &isolated).unwrap_err();
        for part in [
            "host b",
            "shm: this side runs on host a",
            "verbs: ",
            "tcp: the peer has no",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
        let text = serde_json::to_string(&a).unwrap();
        assert_eq!(serde_json::from_str::<Endpoint>(&text).unwrap(), a);
    }

    #[test]
    fn a_forced_route_is_used_or_refused() {
        let force = |endpoint: Endpoint, route| Endpoint {
            forced: Some(route),
            ..endpoint
        };
        let (a, b) = (endpoint("a", None), endpoint("a", Some(Fabric::Ethernet)));
        assert_eq!(route(&force(a.clone(), Route::Tcp), &b), Ok(Route::Tcp));
        let error = route(&force(b.clone(), Route::Verbs), &a).unwrap_err();
        assert!(error.contains("verbs: the peer: no active port"), "{error}");
        let error = route(&a, &force(b.clone(), Route::Verbs)).unwrap_err();
        assert!(
            error.contains("verbs: this side: no active port"),
            "{error}"
        );
        let error = route(&force(a, Route::Tcp), &force(b, Route::Verbs)).unwrap_err();
        assert!(error.contains("forces tcp, the peer verbs"), "{error}");
        assert_eq!("verbs".parse::<Route>().unwrap(), Route::Verbs);
        assert!("nccl".parse::<Route>().is_err());
    }
}
