//! Configuration of a communicator.

use core::mem::offset_of;
use std::ffi::CString;

use crate::sys::ncclConfig_t;
use crate::{Comm, Error, Library, Result, result};

const NAME: &str = "ncclCommInitRankConfig";
const TOO_OLD: &str = "the library is too old for this value of the configuration";

/// Values of `ncclConfig_t`, by their names.
#[derive(Debug)]
pub struct Config {
    library: Library,
    raw: ncclConfig_t,
    /// Owners of the texts that `raw` points to.
    texts: Vec<CString>,
}

impl Config {
    /// Names of the values that [`Config::set`] knows.
    pub const NAMES: &[&str] = &[
        "cgaClusterSize",
        "minCTAs",
        "maxCTAs",
        "netName",
        "splitShare",
        "trafficClass",
        "commName",
        "collnetEnable",
        "CTAPolicy",
        "shrinkShare",
        "nvlsCTAs",
        "nChannelsPerNetPeer",
        "nvlinkCentricSched",
    ];

    /// Creates a configuration without values, for communicators of `library`.
    pub const fn new(library: Library) -> Self {
        Self {
            raw: library.config(),
            library,
            texts: Vec::new(),
        }
    }

    /// Sets a value of [`Config::NAMES`].
    ///
    /// # Errors
    /// [`Error::Argument`] if the name is unknown, the value is neither a number nor (for `netName`
    /// and `commName`) a text, or the library is too old to read the value.
    pub fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let refuse = |reason| {
            Err(Error::Argument {
                operation: NAME,
                reason,
            })
        };
        let raw = &mut self.raw;
        let readable = raw.size;
        macro_rules! fields {
            (numbers $($number:ident)*, texts $($text:ident)*) => {
                match name {
                    $(stringify!($number) => {
                        if offset_of!(ncclConfig_t, $number) >= readable {
                            return refuse(TOO_OLD);
                        }
                        let Ok(number) = value.parse() else {
                            return refuse("the value is not a number");
                        };
                        raw.$number = number;
                    })*
                    $(stringify!($text) => {
                        if offset_of!(ncclConfig_t, $text) >= readable {
                            return refuse(TOO_OLD);
                        }
                        let Ok(text) = CString::new(value) else {
                            return refuse("a text contains a NUL byte");
                        };
                        // The address stays valid when the vector moves the `CString`.
                        raw.$text = text.as_ptr();
                        self.texts.push(text);
                    })*
                    _ => return refuse("no such value of the configuration"),
                }
            };
        }
        fields!(
            numbers cgaClusterSize minCTAs maxCTAs splitShare trafficClass collnetEnable CTAPolicy
                shrinkShare nvlsCTAs nChannelsPerNetPeer nvlinkCentricSched,
            texts netName commName
        );
        Ok(())
    }
}

impl Library {
    /// Creates rank `rank` of `count` with the values of `config`. Blocks until all ranks have
    /// called it with the same id.
    ///
    /// # Errors
    /// [`Error::Unsupported`] before NCCL 2.14; [`Error::Call`]; [`Error::Argument`] if `config` is
    /// for another library.
    pub fn init_rank_with(
        &self,
        count: usize,
        id: crate::sys::ncclUniqueId,
        rank: usize,
        config: &Config,
    ) -> Result<Comm> {
        let table = self.as_raw();
        let Some(init) = table.comm_init_rank_config else {
            return Err(Error::Unsupported {
                symbol: NAME,
                version: self.version(),
            });
        };
        if !core::ptr::eq(config.library.as_raw(), table) {
            return Err(Error::Argument {
                operation: NAME,
                reason: "the configuration is for another library",
            });
        }
        let (count, rank) = (
            crate::library::int(NAME, count)?,
            crate::library::int(NAME, rank)?,
        );
        let (mut raw, mut values) = (core::ptr::null_mut(), config.raw);
        // SAFETY: `raw` is writable, and `values` is a configuration in a layout that the library
        // can read, whose texts `config` keeps alive. The call blocks, so both outlive the
        // library's use of them.
        let code = unsafe { init(&raw mut raw, count, id, rank, &raw mut values) };
        result::check(table, NAME, code)?;
        // SAFETY: `raw` is a new communicator of this library, which nothing else owns.
        unsafe { Comm::from_raw(*self, raw) }
    }
}
