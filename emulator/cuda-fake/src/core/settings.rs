//! Settings of the devices.

use core::ops::RangeInclusive;
use core::str::FromStr;
use core::time::Duration;
use std::sync::OnceLock;

use fusewire_emulator::{MemoryModel, Scheduler};

use super::record::log_refusal;

/// Execution of kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Execution {
    /// The emulator executes the PTX of the loaded image.
    #[default]
    Ptx,
    /// The native entry of the kernel runs, with one lane per block. The crate of the kernel must
    /// be linked into the program.
    Native,
}

/// Settings of the devices. The default is one device like an H200, which executes PTX in a random
/// order with the weak memory model.
///
/// The [environment variables](crate#environment-variables) have priority.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settings {
    /// Execution of kernels: their PTX, or their native entries.
    pub execution: Execution,
    /// Number of devices (1). With 0, `cuInit` finds no device.
    pub devices: u32,
    /// Compute capability times ten (90).
    pub capability: u32,
    /// Number of SMs of a device (132).
    pub multiprocessors: u32,
    /// Maximum number of threads of a block (1024). If it is less than
    /// [`fusewire::Options::threads`], the library launches blocks of this size. The emulator
    /// executes smaller blocks faster.
    pub max_threads: u32,
    /// Size of a device's memory in bytes (the size of an H200).
    pub memory_bytes: u64,
    /// The devices support multicast objects, which NVLS needs (false).
    pub multicast: bool,
    /// Order in which emulated warps execute (`Random(1)`).
    pub scheduler: Scheduler,
    /// Memory model of emulated kernels (`Weak`).
    pub memory_model: MemoryModel,
    /// Time without progress after which emulated launches fail (300 s).
    pub hang_after: Duration,
    /// Emulated launches count trips, which are dependent round trips to memory ([`crate::trips`];
    /// false).
    pub trips: bool,
    /// The devices report peer access to each other.
    pub(crate) peer_access: bool,
    /// Version of the driver (12080).
    pub(crate) driver: u32,
    /// Memory can be exported as a file descriptor.
    pub(crate) descriptors: bool,
    /// Name of the devices' fabric.
    pub(crate) fabric: Option<String>,
    /// The devices have native atomics for each other's memory.
    pub(crate) atomics: bool,
    /// Number of the host, which is part of the devices' UUIDs.
    pub(crate) host: u8,
    /// Host accesses to device memory crash while devices are idle.
    pub(crate) guard: bool,
    /// New device memory is filled with [`POISON`].
    pub(crate) poison: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            execution: Execution::Ptx,
            devices: 1,
            capability: 90,
            multiprocessors: 132,
            max_threads: 1024,
            memory_bytes: H200_MEMORY,
            multicast: false,
            peer_access: true,
            scheduler: Scheduler::Random(1),
            memory_model: MemoryModel::Weak,
            hang_after: Duration::from_secs(300),
            trips: false,
            driver: 12_080,
            descriptors: true,
            fabric: None,
            atomics: true,
            host: 0,
            guard: false,
            poison: true,
        }
    }
}

impl Settings {
    /// Replaces settings by those of the environment. Also returns messages that name variables
    /// with wrong values, which have no effect.
    fn with_environment(mut self) -> (Self, Vec<String>) {
        let mut wrong = Vec::new();
        if let Ok(text) = std::env::var("FUSEWIRE_FAKE_GPU") {
            match text.as_str() {
                "ptx" => self.execution = Execution::Ptx,
                "native" => self.execution = Execution::Native,
                "" => {}
                other => wrong.push(format!(
                    "FUSEWIRE_FAKE_GPU is {other:?}; expected ptx or native"
                )),
            }
        }
        let mut read = Variables(&mut wrong);
        read.read("DEVICES", "a number", number, &mut self.devices);
        read.read("SM", "a number", number, &mut self.capability);
        read.read(
            "MULTIPROCESSORS",
            "a number",
            number,
            &mut self.multiprocessors,
        );
        read.read("THREADS", "a number", number, &mut self.max_threads);
        read.read("MEMORY", "a number", number, &mut self.memory_bytes);
        read.read("MULTICAST", "0 or 1", flag, &mut self.multicast);
        read.read("PEER_ACCESS", "0 or 1", flag, &mut self.peer_access);
        let orders = "round-robin, random:SEED or starve:DEVICE:BLOCK";
        read.read("SCHEDULER", orders, scheduler, &mut self.scheduler);
        let models = "unchecked, checked or weak";
        read.read("MEMORY_MODEL", models, memory_model, &mut self.memory_model);
        let seconds = |text: &str| number(text).map(Duration::from_secs);
        read.read("HANG", "a number of seconds", seconds, &mut self.hang_after);
        read.read("TRIPS", "0 or 1", flag, &mut self.trips);
        read.read("DRIVER", "a number", number, &mut self.driver);
        read.read("DESCRIPTORS", "0 or 1", flag, &mut self.descriptors);
        if let Some(name) = variable("FABRIC").filter(|name| !name.is_empty()) {
            self.fabric = Some(name);
        }
        read.read("ATOMICS", "0 or 1", flag, &mut self.atomics);
        read.read("HOST", "a number", number, &mut self.host);
        read.read("GUARD", "0 or 1", flag, &mut self.guard);
        read.read("POISON", "0 or 1", flag, &mut self.poison);
        (self, wrong)
    }

    /// Returns a message that names a setting which no device can have.
    fn check(&self) -> core::result::Result<(), String> {
        let within = |name: &str, value: u64, range: RangeInclusive<u64>| {
            if range.contains(&value) {
                return Ok(());
            }
            let (first, last) = (range.start(), range.end());
            Err(format!("{name} is {value}; expected {first} to {last}"))
        };
        // The bus address of a device has two digits.
        within("devices", self.devices.into(), 0..=128)?;
        within("capability", self.capability.into(), 50..=129)?;
        within("multiprocessors", self.multiprocessors.into(), 1..=1024)?;
        within("max_threads", self.max_threads.into(), 32..=1024)?;
        within("memory_bytes", self.memory_bytes, 1 << 20..=1 << 46)
    }
}

/// Byte that fills new device memory.
pub(crate) const POISON: u8 = 0xcb;

/// Size of an H200's memory in bytes.
const H200_MEMORY: u64 = 150_754_820_096;

static SETTINGS: OnceLock<Settings> = OnceLock::new();

/// Sets the settings, except for those that the environment sets. Must be called before the first
/// call of a driver function; later calls have no effect. Returns a message if no device can have
/// the settings, or if a variable has a wrong value.
pub(crate) fn set(settings: Settings) -> core::result::Result<(), String> {
    let (settings, wrong) = settings.with_environment();
    if !wrong.is_empty() {
        return Err(wrong.join("; "));
    }
    settings.check()?;
    SETTINGS.get_or_init(|| settings);
    Ok(())
}

/// Returns the settings. Without a call of [`set`], they are the defaults of the shared object and
/// the settings of the environment.
pub(crate) fn settings() -> &'static Settings {
    SETTINGS.get_or_init(|| {
        let of_object = Settings {
            execution: Execution::Native,
            scheduler: Scheduler::RoundRobin,
            memory_model: MemoryModel::Checked,
            ..Settings::default()
        };
        let (settings, wrong) = of_object.with_environment();
        wrong.iter().for_each(|text| log_refusal(text));
        settings
    })
}

/// Returns the value of `FUSEWIRE_CUDA_FAKE_` + `name`.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(format!("FUSEWIRE_CUDA_FAKE_{name}")).ok()
}

/// Reads variables. Collects messages that name variables with wrong values.
struct Variables<'a>(&'a mut Vec<String>);

impl Variables<'_> {
    /// Replaces `setting` by the value of a variable, if the variable is set. A message names the
    /// `expected` values.
    fn read<T>(
        &mut self,
        name: &str,
        expected: &str,
        parse: impl Fn(&str) -> Option<T>,
        setting: &mut T,
    ) {
        let Some(text) = variable(name) else {
            return;
        };
        match parse(text.trim()) {
            Some(value) => *setting = value,
            None => self.0.push(format!(
                "FUSEWIRE_CUDA_FAKE_{name} is {text:?}; expected {expected}"
            )),
        }
    }
}

fn number<T: FromStr>(text: &str) -> Option<T> {
    text.parse().ok()
}

fn flag(text: &str) -> Option<bool> {
    text.parse::<u64>().ok().map(|number| number != 0)
}

fn memory_model(text: &str) -> Option<MemoryModel> {
    match text {
        "unchecked" => Some(MemoryModel::Unchecked),
        "checked" => Some(MemoryModel::Checked),
        "weak" => Some(MemoryModel::Weak),
        _ => None,
    }
}

/// Parses `round-robin`, `random:SEED`, or `starve:DEVICE:BLOCK`, where `*` stands for all devices
/// or blocks.
fn scheduler(text: &str) -> Option<Scheduler> {
    let mut words = text.split(':');
    match (words.next(), words.next(), words.next(), words.next()) {
        (Some("round-robin"), None, None, None) => Some(Scheduler::RoundRobin),
        (Some("random"), Some(seed), None, None) => number(seed).map(Scheduler::Random),
        (Some("starve"), Some(device), block, None) => Some(Scheduler::Starve {
            device: number_or_all(device)?,
            block: number_or_all(block.unwrap_or("*"))?,
        }),
        _ => None,
    }
}

/// Parses a number, or `*` as `None`.
fn number_or_all<T: FromStr>(text: &str) -> Option<Option<T>> {
    match text {
        "*" => Some(None),
        number => number.parse().ok().map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_settings_are_named() {
        assert_eq!(Settings::default().check(), Ok(()));
        let settings = Settings {
            multiprocessors: 0,
            ..Settings::default()
        };
        let message = "multiprocessors is 0; expected 1 to 1024";
        assert_eq!(settings.check(), Err(message.to_owned()));
    }

    #[test]
    fn schedulers_have_names() {
        let starve = |device, block| Some(Scheduler::Starve { device, block });
        assert_eq!(scheduler("round-robin"), Some(Scheduler::RoundRobin));
        assert_eq!(scheduler("random:7"), Some(Scheduler::Random(7)));
        assert_eq!(scheduler("starve:1:2"), starve(Some(1), Some(2)));
        assert_eq!(scheduler("starve:*:2"), starve(None, Some(2)));
        assert_eq!(scheduler("starve:1"), starve(Some(1), None));
        for wrong in [
            "",
            "random",
            "random:x",
            "starve:x:1",
            "starve:1:2:3",
            "other",
        ] {
            assert_eq!(scheduler(wrong), None, "{wrong}");
        }
    }
}
