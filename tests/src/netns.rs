//! Emulates two hosts with two network namespaces of this machine, connected by a virtual cable.

use core::time::Duration;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::thread;

/// Two namespaces, `a` and `b`, with one address each. Dropping the value removes the namespaces.
#[derive(Debug)]
pub struct Cable {
    names: [String; 2],
    links: [String; 2],
}

/// The addresses of the two ends of the cable.
pub const ADDRESSES: [&str; 2] = ["10.77.0.1", "10.77.0.2"];

fn ip(arguments: &[&str]) -> Result<(), String> {
    let ran = Command::new("ip")
        .args(arguments)
        .output()
        .map_err(|error| format!("ip: {error}"))?;
    if ran.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&ran.stderr).trim().to_owned();
    Err(format!("ip {}: {said}", arguments.join(" ")))
}

/// Waits until the system reports that the link is up, which it does some time after both ends were
/// set up.
fn await_up(namespace: &str, link: &str) -> Result<(), String> {
    for _ in 0..500 {
        let shown = Command::new("ip")
            .args(["-n", namespace, "-o", "link", "show", "dev", link])
            .output()
            .map_err(|error| format!("ip: {error}"))?;
        if String::from_utf8_lossy(&shown.stdout).contains("state UP") {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(10));
    }
    Err(format!("the link {link} did not come up"))
}

impl Cable {
    /// Creates both namespaces and the cable. `tag` makes their names unique among concurrent
    /// tests.
    ///
    /// # Errors
    /// Fails if the program `ip` is missing or if the process may not create namespaces. The error
    /// names the missing requirement.
    pub fn new(tag: &str) -> Result<Self, String> {
        let process = std::process::id();
        // Linux limits the names of links to 15 characters.
        let cable = Self {
            names: ["a", "b"].map(|end| format!("fw-{tag}-{process}-{end}")),
            links: ["a", "b"].map(|end| format!("fw{tag}{process}{end}")),
        };
        let [a, b] = &cable.names;
        let [link_a, link_b] = &cable.links;
        ip(&["netns", "add", a])?;
        ip(&["netns", "add", b])?;
        ip(&[
            "link", "add", link_a, "netns", a, "type", "veth", "peer", "name", link_b, "netns", b,
        ])?;
        for ((name, link), address) in cable.names.iter().zip(&cable.links).zip(ADDRESSES) {
            let address = format!("{address}/24");
            ip(&["-n", name, "addr", "add", &address, "dev", link])?;
            ip(&["-n", name, "link", "set", link, "up"])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        for (name, link) in cable.names.iter().zip(&cable.links) {
            await_up(name, link)?;
        }
        Ok(cable)
    }

    /// Returns the name of the namespace at `end` (0 or 1) of the cable.
    pub fn name(&self, end: usize) -> &str {
        &self.names[end]
    }

    /// Cuts the cable.
    ///
    /// # Errors
    /// Returns the message of `ip`.
    pub fn cut(&self) -> Result<(), String> {
        ip(&["-n", &self.names[0], "link", "set", &self.links[0], "down"])
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for name in &self.names {
            // The namespace may be missing if `new` failed.
            let _ = ip(&["netns", "del", name]);
        }
    }
}

/// Moves this thread, and the threads that this thread starts later, into a namespace.
///
/// # Errors
/// Returns the system's error.
pub fn enter(name: &str) -> io::Result<()> {
    let namespace = File::open(format!("/run/netns/{name}"))?;
    // SAFETY: `namespace` keeps the descriptor open, and setns accesses no memory of the process.
    if unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) } == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}
