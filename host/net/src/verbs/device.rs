//! Devices, their ports, and opened devices.

use core::ffi::{CStr, c_int};
use core::fmt;
use core::net::{IpAddr, Ipv6Addr};
use core::ptr::NonNull;
use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use fusewire_verbs_sys::bindings::{
    IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2, IBV_PORT_ACTIVE, Library,
    ibv_context, ibv_device_attr, ibv_gid_entry, ibv_pd, ibv_port_attr,
};

use super::{distance, failed};
use crate::{Error, Result, TransportFailure};

/// Value of `ibv_port_attr::link_layer` for Ethernet.
const LINK_LAYER_ETHERNET: u8 = 2;

/// Link layer of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand: ports are addressed by local identifiers (LIDs), which the subnet manager
    /// assigns.
    InfiniBand,
    /// Ethernet: RDMA over converged Ethernet (RoCE).
    Ethernet,
}

/// Kind of a GID, which determines the packet format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand.
    InfiniBand,
    /// RoCE version 1: directly over Ethernet, not routable.
    RoceV1,
    /// RoCE version 2: over UDP and IP, routable.
    RoceV2,
}

/// Address of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Index in the port's table of GIDs.
    pub index: u32,
    /// The address.
    pub bytes: [u8; 16],
    /// Kind of the GID.
    pub kind: GidKind,
}

/// Port of an RDMA device.
#[derive(Clone, Debug)]
pub struct VerbsPort {
    /// Name of the device, such as `mlx5_0`.
    pub device: String,
    /// Number of the port. The first port is 1.
    pub number: u8,
    /// True if the port can transfer data.
    pub is_active: bool,
    /// Link layer of the port.
    pub link_layer: LinkLayer,
    /// Maximum payload of a packet in bytes.
    pub mtu: u32,
    /// Bandwidth in Gbit/s.
    pub gbits: f64,
    /// Addresses of the port.
    pub gids: Vec<Gid>,
    /// Local identifier. 0 on Ethernet.
    pub(super) lid: u16,
    /// `mtu` as a value of `ibv_mtu`.
    pub(super) mtu_code: u32,
}

/// Requirements on the port of a connection. The default accepts every port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PortChoice {
    pub(crate) device: Option<String>,
    pub(crate) port: Option<u8>,
    pub(crate) gid_index: Option<u32>,
    /// PCI device to which the RDMA device should be near.
    pub(crate) near: Option<String>,
    /// Number of the port among those that are equally near.
    pub(crate) rail: u32,
}

impl Gid {
    /// Returns the IP address that the GID encodes, if it can be reached from other hosts.
    pub fn ip(&self) -> Option<IpAddr> {
        let address = Ipv6Addr::from(self.bytes);
        match address.to_ipv4_mapped() {
            Some(address) => Some(address.into()),
            None if self.kind == GidKind::RoceV2 && !address.is_unicast_link_local() => {
                Some(address.into())
            }
            None => None,
        }
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            GidKind::InfiniBand => "InfiniBand",
            GidKind::RoceV1 => "RoCE v1",
            GidKind::RoceV2 => "RoCE v2",
        };
        match self.ip() {
            Some(address) => write!(f, "{address} ({kind})"),
            None => write!(f, "{} ({kind})", Ipv6Addr::from(self.bytes)),
        }
    }
}

impl fmt::Display for VerbsPort {
    /// Formats the port for people: name, state, link layer, bandwidth, address.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.is_active {
            "active"
        } else {
            "not active"
        };
        let layer = match self.link_layer {
            LinkLayer::InfiniBand => "InfiniBand",
            LinkLayer::Ethernet => "Ethernet",
        };
        let (name, number) = (&self.device, self.number);
        write!(
            f,
            "{name} port {number}, {state}, {layer}, {} Gbit/s",
            self.gbits
        )?;
        match self.gid(None) {
            Some(gid) => write!(f, ", {gid}"),
            None => f.write_str(", no GID"),
        }
    }
}

impl VerbsPort {
    /// Returns the GID from which connections are made: the requested one, or the first GID of the
    /// best kind. On Ethernet, RoCE v2 from an IPv4 address is best, then RoCE v2 from a routable
    /// IPv6 address, then from a link-local address. RoCE v1 is used only on request.
    pub(crate) fn gid(&self, index: Option<u32>) -> Option<Gid> {
        if index.is_some() {
            return self
                .gids
                .iter()
                .find(|gid| Some(gid.index) == index)
                .copied();
        }
        let rank = |gid: &&Gid| match (gid.kind, gid.ip()) {
            (GidKind::InfiniBand, _) | (GidKind::RoceV2, Some(IpAddr::V4(_))) => 0,
            (GidKind::RoceV2, Some(IpAddr::V6(_))) => 1,
            _ => 2,
        };
        let usable = |gid: &&Gid| gid.kind != GidKind::RoceV1;
        self.gids.iter().filter(usable).min_by_key(rank).copied()
    }
}

/// Opened device with a protection domain. All links of the process share one context per device,
/// so memory is registered once.
pub(crate) struct Context {
    pub(super) verbs: &'static Library,
    pub(super) context: NonNull<ibv_context>,
    pub(super) domain: NonNull<ibv_pd>,
    pub(super) attributes: ibv_device_attr,
    device: String,
}

// SAFETY: the functions of libibverbs may be called from any thread, with the same objects.
unsafe impl Send for Context {}
// SAFETY: see `Send`.
unsafe impl Sync for Context {}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl Context {
    /// Returns the name of the device.
    pub(crate) fn device(&self) -> &str {
        &self.device
    }

    /// Opens the device of the nearest active port that meets the requirements. Returns the port,
    /// too.
    pub(crate) fn open(choice: &PortChoice) -> Result<(Arc<Self>, VerbsPort)> {
        let ports = verbs_ports()?;
        let fits = |port: &&VerbsPort| {
            port.is_active
                && choice
                    .device
                    .as_ref()
                    .is_none_or(|name| *name == port.device)
                && choice.port.is_none_or(|number| number == port.number)
                && port.gid(choice.gid_index).is_some()
        };
        let fitting: Vec<_> = ports.iter().filter(fits).collect();
        let sysfs = Path::new("/sys");
        let port = distance::choose(sysfs, &fitting, choice.near.as_deref(), choice.rail)?;
        let port = port.ok_or_else(|| {
            let found: Vec<_> = ports.iter().map(VerbsPort::to_string).collect();
            let found = match found.is_empty() {
                true => "this host has no RDMA device".to_owned(),
                false => format!("this host has {}", found.join("; ")),
            };
            Error::Call {
                operation: "open an RDMA device",
                peer: choice.summary(),
                kind: TransportFailure::System,
                detail: format!("no active port meets the requirements; {found}"),
            }
        })?;
        Ok((Self::of_device(&port.device)?, port.clone()))
    }

    /// Opens a device, or returns the context that the process has already opened.
    fn of_device(name: &str) -> Result<Arc<Self>> {
        static OPENED: Mutex<Option<HashMap<String, Weak<Context>>>> = Mutex::new(None);
        // The map is consistent after every statement, so a poisoned lock is harmless.
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        let opened = opened.get_or_insert_default();
        if let Some(context) = opened.get(name).and_then(Weak::upgrade) {
            return Ok(context);
        }
        let mut devices = Devices::list()?;
        let context = devices.open(name)?.with_domain()?;
        let context = Arc::new(context);
        opened.insert(name.to_owned(), Arc::downgrade(&context));
        Ok(context)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: `Opened::with_domain` created both objects, and this is their only owner. Queue
        // pairs and memory regions keep the context alive, so none of them is left.
        unsafe {
            self.verbs.ibv_dealloc_pd(self.domain.as_ptr());
            self.verbs.ibv_close_device(self.context.as_ptr());
        }
    }
}

impl PortChoice {
    fn summary(&self) -> String {
        let device = self.device.as_deref().unwrap_or("any RDMA device");
        let port = self.port.map(|port| format!(", port {port}"));
        let gid = self.gid_index.map(|index| format!(", GID index {index}"));
        format!(
            "{device}{}{}",
            port.unwrap_or_default(),
            gid.unwrap_or_default()
        )
    }
}

/// Returns all ports of all RDMA devices of this host. A device that cannot be opened is skipped.
///
/// # Errors
/// [`Error::Call`] if libibverbs is not installed, or no device can be listed.
pub fn verbs_ports() -> Result<Vec<VerbsPort>> {
    let mut devices = Devices::list()?;
    let mut ports = Vec::new();
    for name in devices.names() {
        match devices.open(&name) {
            Ok(device) => ports.extend(device.ports(&name)),
            Err(error) => tracing::debug!(%error, "an RDMA device was skipped"),
        }
    }
    Ok(ports)
}

/// List of devices of libibverbs.
struct Devices {
    verbs: &'static Library,
    list: *mut *mut fusewire_verbs_sys::bindings::ibv_device,
    count: usize,
}

impl Devices {
    fn list() -> Result<Self> {
        let verbs = fusewire_verbs_sys::open().map_err(|detail| Error::Call {
            operation: "open libibverbs",
            peer: "this host".to_owned(),
            kind: TransportFailure::System,
            detail: detail.clone(),
        })?;
        let mut count: c_int = 0;
        // SAFETY: `count` is writable.
        let list = unsafe { verbs.ibv_get_device_list(&raw mut count) };
        if list.is_null() {
            let error = io::Error::last_os_error();
            // A kernel without RDMA has no devices.
            if error.raw_os_error() != Some(libc::ENOSYS) {
                return Err(failed("ibv_get_device_list", "list", &error));
            }
            count = 0;
        }
        Ok(Self {
            verbs,
            list,
            count: usize::try_from(count).unwrap_or(0),
        })
    }

    fn names(&self) -> Vec<String> {
        (0..self.count).map(|index| self.name(index)).collect()
    }

    fn name(&self, index: usize) -> String {
        assert!(index < self.count);
        // SAFETY: the list has `count` devices, and is freed by `drop`. The name lives as long as
        // the device, and ends with a zero byte.
        unsafe {
            let name = self.verbs.ibv_get_device_name(*self.list.add(index));
            CStr::from_ptr(name).to_string_lossy().into_owned()
        }
    }

    fn open(&mut self, name: &str) -> Result<Opened> {
        let none = || {
            failed(
                "ibv_open_device",
                name,
                &io::Error::from(io::ErrorKind::NotFound),
            )
        };
        let index = (0..self.count).find(|index| self.name(*index) == name);
        let index = index.ok_or_else(none)?;
        // SAFETY: `index` is below the length of the list, which is live.
        let context = unsafe { self.verbs.ibv_open_device(*self.list.add(index)) };
        Ok(Opened {
            verbs: self.verbs,
            context: NonNull::new(context)
                .ok_or_else(|| failed("ibv_open_device", name, &io::Error::last_os_error()))?,
            name: name.to_owned(),
        })
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        if !self.list.is_null() {
            // SAFETY: `list` came from `ibv_get_device_list`, and is freed once.
            unsafe { self.verbs.ibv_free_device_list(self.list) };
        }
    }
}

/// Opened device without a protection domain.
struct Opened {
    verbs: &'static Library,
    context: NonNull<ibv_context>,
    name: String,
}

impl Opened {
    fn attributes(&self) -> Result<ibv_device_attr> {
        // SAFETY: all bytes of the structure may be zero.
        let mut attributes: ibv_device_attr = unsafe { core::mem::zeroed() };
        let context = self.context.as_ptr();
        // SAFETY: the context is live, and `attributes` is writable.
        let code = unsafe { self.verbs.ibv_query_device(context, &raw mut attributes) };
        match code {
            0 => Ok(attributes),
            code => Err(failed(
                "ibv_query_device",
                &self.name,
                &io::Error::from_raw_os_error(code),
            )),
        }
    }

    fn with_domain(self) -> Result<Context> {
        let attributes = self.attributes()?;
        // SAFETY: the context is live.
        let domain = unsafe { self.verbs.ibv_alloc_pd(self.context.as_ptr()) };
        let domain = NonNull::new(domain)
            .ok_or_else(|| failed("ibv_alloc_pd", &self.name, &io::Error::last_os_error()))?;
        let mut this = core::mem::ManuallyDrop::new(self);
        Ok(Context {
            verbs: this.verbs,
            context: this.context,
            domain,
            attributes,
            device: core::mem::take(&mut this.name),
        })
    }

    fn ports(&self, device: &str) -> Vec<VerbsPort> {
        let count = self.attributes().map_or(0, |device| device.phys_port_cnt);
        (1..=count)
            .filter_map(|number| self.port(device, number))
            .collect()
    }

    fn port(&self, device: &str, number: u8) -> Option<VerbsPort> {
        // SAFETY: all bytes of the structure may be zero.
        let mut port: ibv_port_attr = unsafe { core::mem::zeroed() };
        let context = self.context.as_ptr();
        // SAFETY: the context is live. The function writes a part of the structure: the fields that
        // its first version had.
        let code = unsafe {
            self.verbs
                .ibv_query_port(context, number, (&raw mut port).cast())
        };
        if code != 0 {
            return None;
        }
        let gids = (0..u32::try_from(port.gid_tbl_len).unwrap_or(0))
            .filter_map(|index| self.gid(number, index));
        Some(VerbsPort {
            device: device.to_owned(),
            number,
            is_active: port.state == IBV_PORT_ACTIVE,
            link_layer: match port.link_layer {
                LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
                _ => LinkLayer::InfiniBand,
            },
            mtu: 128 << port.active_mtu.clamp(1, 5),
            gbits: gbits(port.active_width, port.active_speed),
            gids: gids.collect(),
            lid: port.lid,
            mtu_code: port.active_mtu,
        })
    }

    fn gid(&self, port: u8, index: u32) -> Option<Gid> {
        // SAFETY: all bytes of the structure may be zero.
        let mut entry: ibv_gid_entry = unsafe { core::mem::zeroed() };
        let (context, size) = (self.context.as_ptr(), size_of::<ibv_gid_entry>());
        // SAFETY: the context is live, and `entry` is writable for `size` bytes.
        let code = unsafe {
            self.verbs
                ._ibv_query_gid_ex(context, port.into(), index, &raw mut entry, 0, size)
        };
        // SAFETY: all members of the union consist of bytes.
        let bytes = unsafe { entry.gid.raw };
        let kind = match entry.gid_type {
            IBV_GID_TYPE_IB => GidKind::InfiniBand,
            IBV_GID_TYPE_ROCE_V1 => GidKind::RoceV1,
            IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
            _ => return None,
        };
        (code == 0 && bytes != [0; 16]).then_some(Gid { index, bytes, kind })
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: `Devices::open` opened the device, and this is its only owner.
        unsafe { self.verbs.ibv_close_device(self.context.as_ptr()) };
    }
}

/// Bandwidth of a port in Gbit/s, from `ibv_port_attr::active_width` and `active_speed`.
fn gbits(width: u8, speed: u8) -> f64 {
    let lanes = match width {
        2 => 4.0,
        4 => 8.0,
        8 => 12.0,
        16 => 2.0,
        _ => 1.0,
    };
    let lane = match speed {
        1 => 2.5,
        2 => 5.0,
        4 | 8 => 10.0,
        16 => 14.0,
        32 => 25.0,
        64 => 50.0,
        128 => 100.0,
        _ => 0.0,
    };
    lanes * lane
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u32, address: &str, kind: GidKind) -> Gid {
        let bytes = address.parse::<Ipv6Addr>().unwrap().octets();
        Gid { index, bytes, kind }
    }

    #[test]
    fn the_gid_of_a_routable_address_is_chosen() {
        let mut port = VerbsPort {
            device: "mlx5_0".to_owned(),
            number: 1,
            is_active: true,
            link_layer: LinkLayer::Ethernet,
            mtu: 4096,
            gbits: 400.0,
            gids: vec![
                gid(0, "fe80::1", GidKind::RoceV1),
                gid(1, "fe80::1", GidKind::RoceV2),
                gid(2, "::ffff:10.0.0.1", GidKind::RoceV1),
                gid(3, "::ffff:10.0.0.1", GidKind::RoceV2),
                gid(4, "2001:db8::1", GidKind::RoceV2),
            ],
            lid: 0,
            mtu_code: 5,
        };
        let index = |port: &VerbsPort, request| port.gid(request).map(|gid| gid.index);
        assert_eq!(index(&port, None), Some(3));
        assert_eq!(port.gid(None).unwrap().ip(), Some([10, 0, 0, 1].into()));
        assert_eq!(index(&port, Some(2)), Some(2));
        assert_eq!(index(&port, Some(9)), None);
        port.gids.remove(3);
        assert_eq!(index(&port, None), Some(4));
        port.gids.pop();
        assert_eq!(index(&port, None), Some(1));
        assert_eq!(port.gid(None).unwrap().ip(), None);
        port.gids = vec![gid(0, "fe80::2", GidKind::RoceV1)];
        assert_eq!(index(&port, None), None);
        assert_eq!(gbits(2, 128), 400.0);
        assert_eq!(gbits(1, 1), 2.5);
    }
}
