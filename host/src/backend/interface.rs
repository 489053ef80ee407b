//! Chooses the address at which other hosts reach this host.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::collections::BTreeMap;
use std::net::{ToSocketAddrs, UdpSocket};
use std::{env, fs};

use fusewire_gloo_sys as sys;

use super::Reach;

/// Returns the address to listen on. The first of these that is set determines the address: the
/// hints `hostname` and `interface`, the environment variables `TORCHCOMM_GLOO_HOSTNAME`,
/// `TORCHCOMM_GLOO_INTERFACE` and `GLOO_SOCKET_IFNAME`. If none is set and all ranks are on one
/// host, returns the loopback address. Otherwise returns the address from which this host reaches
/// `MASTER_ADDR`, or else the address of its host name.
pub(super) fn device(hints: &BTreeMap<String, String>, reach: Reach) -> sys::TcpOptions {
    if let Some(name) = hints.get("hostname") {
        return sys::TcpOptions::Hostname(name.clone());
    }
    if let Some(name) = hints.get("interface") {
        return sys::TcpOptions::Interface(name.clone());
    }
    let variable = |name| env::var(name).ok().filter(|value| !value.is_empty());
    if let Some(name) = variable("TORCHCOMM_GLOO_HOSTNAME") {
        return sys::TcpOptions::Hostname(name);
    }
    let interface = variable("TORCHCOMM_GLOO_INTERFACE").or_else(|| variable("GLOO_SOCKET_IFNAME"));
    if let Some(name) = interface {
        return sys::TcpOptions::Interface(name);
    }
    if reach == Reach::Host {
        return sys::TcpOptions::loopback();
    }
    if let Some(address) = variable("MASTER_ADDR").and_then(|to| address_towards(&to)) {
        return sys::TcpOptions::Address(address);
    }
    match first_line("/proc/sys/kernel/hostname") {
        Some(name) => sys::TcpOptions::Hostname(name),
        None => sys::TcpOptions::loopback(),
    }
}

fn first_line(path: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// Returns this host's source address for packets to `to`, according to the routing table. Sends
/// nothing. Returns `None` if the address is the loopback, which other hosts cannot reach.
fn address_towards(to: &str) -> Option<IpAddr> {
    /// Any port works, because nothing is sent.
    const DISCARD: u16 = 9;
    (to, DISCARD).to_socket_addrs().ok()?.find_map(|to| {
        let any: IpAddr = match to {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect(to).ok()?;
        let own = socket.local_addr().ok()?.ip();
        (!own.is_loopback() && !own.is_unspecified()).then_some(own)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loopback_leads_to_no_other_host() {
        assert_eq!(address_towards("127.0.0.1"), None);
        assert_eq!(address_towards("::1"), None);
        assert_eq!(address_towards("no.such.host.invalid"), None);
    }
}
