//! Network interfaces, and the choice of the one on which links listen.

use core::net::IpAddr;
use std::env;

use crate::{Error, Result, TransportFailure};

/// Environment variable that selects interfaces.
pub(crate) const VARIABLE: &str = "FUSEWIRE_SOCKET_IFNAME";

/// Prefixes of interfaces that connect containers and virtual machines of one host.
const VIRTUAL: [&str; 7] = ["docker", "veth", "br-", "virbr", "cni", "flannel", "cali"];

/// Address of a network interface that is up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Name, such as `eth0`.
    pub name: String,
    /// Address of the interface. An interface with several addresses is listed once for each.
    pub address: IpAddr,
}

/// Returns the addresses of this host's interfaces, in the order of the system.
///
/// # Errors
/// [`Error::Call`] if the system does not list them.
pub fn interfaces() -> Result<Vec<Interface>> {
    let listed = if_addrs::get_if_addrs().map_err(|error| Error::Call {
        operation: "list the network interfaces",
        peer: "this host".to_owned(),
        kind: TransportFailure::System,
        detail: error.to_string(),
    })?;
    let is_up = |interface: &if_addrs::Interface| interface.is_oper_up();
    let interfaces = listed.into_iter().filter(is_up).map(|interface| Interface {
        address: interface.ip(),
        name: interface.name,
    });
    Ok(interfaces.collect())
}

/// Returns the first address of the interface `name`.
pub(crate) fn by_name(name: &str) -> Result<IpAddr> {
    let all = interfaces()?;
    let named = all.iter().filter(|interface| interface.name == name);
    let named: Vec<_> = named.cloned().collect();
    choose(&named, "").ok_or_else(|| no_match(&all, name))
}

/// Returns the address that peers on other hosts most likely reach.
pub(crate) fn automatic() -> Result<IpAddr> {
    chosen(&interfaces()?, &env::var(VARIABLE).unwrap_or_default())
}

fn chosen(interfaces: &[Interface], filter: &str) -> Result<IpAddr> {
    choose(interfaces, filter).ok_or_else(|| no_match(interfaces, filter))
}

fn no_match(interfaces: &[Interface], filter: &str) -> Error {
    let listed = interfaces.iter();
    let listed: Vec<_> = listed
        .map(|interface| format!("{} {}", interface.name, interface.address))
        .collect();
    Error::InvalidArgument {
        operation: "choose a network interface",
        detail: format!(
            "no interface matches {filter:?}; this host has {}. Pass a name, or set {VARIABLE}",
            listed.join(", ")
        ),
    }
}

/// Chooses an address. `filter` has the syntax of `NCCL_SOCKET_IFNAME`: prefixes of names,
/// separated by commas; after `=`, whole names; after `^`, names to exclude. Prefers IPv4, and
/// interfaces that are neither virtual nor loopback. Ignores link-local IPv6 addresses.
fn choose(interfaces: &[Interface], filter: &str) -> Option<IpAddr> {
    let (excludes, names) = match filter.strip_prefix('^') {
        Some(names) => (true, names),
        None => (false, filter),
    };
    let (is_whole, names) = match names.strip_prefix('=') {
        Some(names) => (true, names),
        None => (false, names),
    };
    let matches = |interface: &&Interface| {
        let name = interface.name.as_str();
        let mut listed = names.split(',').filter(|listed| !listed.is_empty());
        let is_listed = listed.any(|listed| match is_whole {
            true => name == listed,
            false => name.starts_with(listed),
        });
        names.is_empty() || is_listed != excludes
    };
    let is_reachable = |interface: &&Interface| match interface.address {
        IpAddr::V4(_) => true,
        IpAddr::V6(address) => !address.is_unicast_link_local(),
    };
    let rank = |interface: &&Interface| {
        let is_virtual = VIRTUAL
            .iter()
            .any(|prefix| interface.name.starts_with(prefix));
        (
            interface.address.is_loopback(),
            is_virtual,
            interface.address.is_ipv6(),
        )
    };
    let candidates = interfaces.iter().filter(matches).filter(is_reachable);
    candidates
        .min_by_key(rank)
        .map(|interface| interface.address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interface_that_other_hosts_reach_is_chosen() {
        let interface = |name: &str, address: &str| Interface {
            name: name.to_owned(),
            address: address.parse().unwrap(),
        };
        let all = [
            interface("lo", "127.0.0.1"),
            interface("docker0", "172.17.0.1"),
            interface("eth1", "fe80::1"),
            interface("eth1", "2001:db8::1"),
            interface("eth0", "10.0.0.1"),
            interface("ib0", "10.1.0.1"),
        ];
        let choice = |filter| choose(&all, filter).map(|address| address.to_string());
        for (filter, address) in [
            ("", Some("10.0.0.1")),
            ("ib", Some("10.1.0.1")),
            ("ib1,eth", Some("10.0.0.1")),
            ("=eth1", Some("2001:db8::1")),
            ("=eth", None),
            ("eth1,lo", Some("2001:db8::1")),
            ("^eth", Some("10.1.0.1")),
            ("^eth,ib", Some("172.17.0.1")),
            ("^=eth0,ib0", Some("2001:db8::1")),
            ("^eth,ib,docker", Some("127.0.0.1")),
            ("^eth,ib,docker,lo", None),
        ] {
            assert_eq!(choice(filter).as_deref(), address, "{filter}");
        }
        let message = chosen(&all, "=eth7").unwrap_err().to_string();
        assert!(
            message.contains("eth7") && message.contains("ib0 10.1.0.1"),
            "{message}"
        );
    }

    #[test]
    fn the_system_lists_the_loopback_interface() {
        let all = interfaces().unwrap();
        assert!(
            all.iter().any(|interface| interface.address.is_loopback()),
            "{all:?}"
        );
        assert_eq!(by_name("lo").unwrap(), IpAddr::from([127, 0, 0, 1]));
        assert!(automatic().is_ok());
        for name in ["", "lo,lo", "no-such-interface"] {
            assert!(by_name(name).is_err(), "{name:?}");
        }
    }
}
