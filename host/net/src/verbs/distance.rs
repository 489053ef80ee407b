//! Distances between PCI devices, and the choice of the port next to a GPU.
//!
//! Checked with a fake of `/sys` only: no test ran on a machine with several NICs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::VerbsPort;
use crate::{Error, Result};

/// Distance of two PCI devices, from near to far. In brackets, the name that `nvidia-smi topo -m`
/// and NCCL use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PciDistance {
    /// Below one PCIe switch (PIX).
    Switch,
    /// Below one PCIe root port, across several switches (PXB).
    Switches,
    /// Below one PCIe root complex (PHB).
    RootComplex,
    /// On one NUMA node (NODE).
    NumaNode,
    /// On different NUMA nodes, or unknown (SYS).
    Machine,
}

/// Position of a device in the tree of PCI devices.
struct Position {
    /// Folders of the root complex, of the bridges, and of the device.
    path: Vec<String>,
    numa_node: i32,
}

impl Position {
    /// Reads the position of the device to which `link` points.
    fn read(link: &Path) -> io::Result<Self> {
        let folder = fs::canonicalize(link)?;
        let parts = folder
            .iter()
            .map(|part| part.to_string_lossy().into_owned());
        let path = parts.skip_while(|part| !part.starts_with("pci")).collect();
        let numa_node = fs::read_to_string(folder.join("numa_node")).unwrap_or_default();
        Ok(Self {
            path,
            // A machine with one node may report -1.
            numa_node: numa_node.trim().parse().unwrap_or(-1),
        })
    }

    fn distance(&self, other: &Self) -> PciDistance {
        let pairs = self.path.iter().zip(&other.path);
        let common = pairs.take_while(|(a, b)| a == b).count();
        match common {
            0 if self.numa_node == other.numa_node => PciDistance::NumaNode,
            0 => PciDistance::Machine,
            1 => PciDistance::RootComplex,
            // Below the switch's upstream port, a device is below one downstream port.
            _ if self.path.len().max(other.path.len()) <= common + 2 => PciDistance::Switch,
            _ => PciDistance::Switches,
        }
    }
}

/// Returns the distance of an RDMA device, such as `mlx5_0`, to the PCI device `near`, such as
/// `0000:3b:00.0`. `sysfs` is `/sys`.
fn distance(sysfs: &Path, device: &str, near: &str) -> io::Result<PciDistance> {
    let nic: PathBuf = sysfs.join("class/infiniband").join(device).join("device");
    Ok(Position::read(&nic)?.distance(&pci_device(sysfs, near)?))
}

/// Returns the position of a PCI device. CUDA prints bus ids in capital letters, and NVML with a
/// domain of 8 digits.
fn pci_device(sysfs: &Path, bus_id: &str) -> io::Result<Position> {
    let id = bus_id.to_lowercase();
    let id = match id.split_once(':') {
        Some((domain, rest)) if domain.len() == 8 => format!("{}:{rest}", &domain[4..]),
        _ => id,
    };
    Position::read(&sysfs.join("bus/pci/devices").join(id))
}

/// Chooses one of the ports of a local rank: of the ports that are nearest to `near`, the one of
/// the number `rail`, modulo their count. Ranks with the same number on different hosts use the
/// same rail if the hosts list the same ports in the same order.
pub(super) fn choose<'a>(
    sysfs: &Path,
    ports: &[&'a VerbsPort],
    near: Option<&str>,
    rail: u32,
) -> Result<Option<&'a VerbsPort>> {
    if let Some(near) = near
        && let Err(error) = pci_device(sysfs, near)
    {
        return Err(Error::InvalidArgument {
            operation: "open an RDMA device",
            detail: format!(
                "no PCI device has the bus id {near:?} ({error}); pass an id such as 0000:3b:00.0"
            ),
        });
    }
    let distance = |port: &VerbsPort| {
        let distance = near.map(|near| distance(sysfs, &port.device, near));
        distance.map_or(PciDistance::Switch, |distance| {
            // Devices without a PCI device, such as Soft-RoCE, are far from everything.
            distance.unwrap_or(PciDistance::Machine)
        })
    };
    let Some(nearest) = ports.iter().map(|port| distance(port)).min() else {
        return Ok(None);
    };
    let ports: Vec<_> = ports
        .iter()
        .filter(|port| distance(port) == nearest)
        .collect();
    Ok(Some(ports[rail as usize % ports.len()]))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::super::LinkLayer;
    use super::*;

    /// Creates a fake of `/sys` with two NUMA nodes: a switch with a GPU and two NICs, a GPU and a
    /// NIC at ports of the same root complex, a NIC below a second root complex of the same node,
    /// and a GPU on the other node. The last NIC has no PCI device.
    fn fake() -> tempfile::TempDir {
        let sysfs = tempfile::tempdir().unwrap();
        let add = |link: &str, path: &str, node: i32| {
            let folder = sysfs.path().join("devices").join(path);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("numa_node"), format!("{node}\n")).unwrap();
            let link = sysfs.path().join(link);
            fs::create_dir_all(link.parent().unwrap()).unwrap();
            symlink(folder, link).unwrap();
        };
        let switch = "pci0000:00/0000:00:01.0/0000:01:00.0";
        add(
            "bus/pci/devices/0000:03:00.0",
            &format!("{switch}/0000:02:00.0/0000:03:00.0"),
            0,
        );
        for (name, port) in [("mlx5_0", "0000:02:01.0"), ("mlx5_1", "0000:02:02.0")] {
            let link = format!("class/infiniband/{name}/device");
            add(
                &link,
                &format!(
                    "{switch}/{port}/0000:0{}:00.0",
                    4 + usize::from(name == "mlx5_1")
                ),
                0,
            );
        }
        let second = format!("{switch}/0000:02:03.0/0000:06:00.0/0000:07:00.0/0000:08:00.0");
        add("class/infiniband/mlx5_2/device", &second, 0);
        add(
            "bus/pci/devices/0000:0a:00.0",
            "pci0000:00/0000:00:02.0/0000:0a:00.0",
            0,
        );
        add(
            "class/infiniband/mlx5_3/device",
            "pci0000:40/0000:40:01.0/0000:41:00.0",
            0,
        );
        add(
            "bus/pci/devices/0000:81:00.0",
            "pci0000:80/0000:80:01.0/0000:81:00.0",
            1,
        );
        fs::create_dir_all(sysfs.path().join("class/infiniband/rxe0")).unwrap();
        sysfs
    }

    #[test]
    fn distances_follow_the_tree() {
        use PciDistance::*;

        let sysfs = fake();
        let expected = [
            ("mlx5_0", "0000:03:00.0", Switch),
            ("mlx5_2", "0000:03:00.0", Switches),
            ("mlx5_0", "0000:0A:00.0", RootComplex),
            ("mlx5_3", "00000000:03:00.0", NumaNode),
            ("mlx5_3", "0000:81:00.0", Machine),
            ("mlx5_0", "0000:81:00.0", Machine),
        ];
        for (nic, gpu, expected) in expected {
            assert_eq!(
                distance(sysfs.path(), nic, gpu).unwrap(),
                expected,
                "{nic} {gpu}"
            );
        }
        assert!(distance(sysfs.path(), "rxe0", "0000:03:00.0").is_err());
        assert!(distance(sysfs.path(), "mlx5_0", "0000:ff:00.0").is_err());
        assert!(Switch < Switches && Switches < RootComplex && NumaNode < Machine);
    }

    #[test]
    fn ranks_share_the_nearest_ports() {
        let sysfs = fake();
        let port = |name: &str| VerbsPort {
            device: name.to_owned(),
            number: 1,
            is_active: true,
            link_layer: LinkLayer::InfiniBand,
            mtu: 4096,
            gbits: 400.0,
            gids: Vec::new(),
            lid: 1,
            mtu_code: 5,
        };
        let ports = ["rxe0", "mlx5_3", "mlx5_2", "mlx5_1", "mlx5_0"].map(port);
        let all: Vec<_> = ports.iter().collect();
        let choice = |ports: &[&VerbsPort], near, rail| {
            let chosen = choose(sysfs.path(), ports, near, rail).unwrap();
            chosen.map(|port| port.device.clone())
        };
        let name = |name: &str| Some(name.to_owned());
        assert_eq!(choice(&all, Some("0000:03:00.0"), 0), name("mlx5_1"));
        assert_eq!(choice(&all, Some("0000:03:00.0"), 1), name("mlx5_0"));
        assert_eq!(choice(&all, Some("0000:03:00.0"), 2), name("mlx5_1"));
        // A host with one NIC serves all of its ranks with it.
        assert_eq!(choice(&all[1..2], Some("0000:03:00.0"), 5), name("mlx5_3"));
        // Without a GPU, all ports are equally near.
        assert_eq!(choice(&all, None, 6), name("mlx5_3"));
        assert_eq!(choice(&[], None, 0), None);
        let error = choose(sysfs.path(), &all, Some("3b:00.0"), 0).unwrap_err();
        assert!(error.to_string().contains("3b:00.0"), "{error}");
    }
}
