//! Defines the algorithms of operations.

use core::fmt;

/// Algorithm of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum Algorithm {
    /// The plan chooses the algorithm by operation, size and type.
    #[default]
    Auto = 0,
    /// One hop through packets, for small amounts of data.
    Packet = 1,
    /// One hop with signals: every rank reads the input of every rank.
    Signal = 2,
    /// Two hops: each rank reduces one shard, then gathers the shards of the other ranks.
    TwoShot = 3,
    /// Each rank reads the data from its peers. Only for operations without a reduction.
    Pull = 4,
    /// A channel with flow control. Only for send and receive.
    Channel = 5,
    /// The library that is the communicator's backend carries out the operation.
    HandOff = 6,
    /// Multicast (NVLink SHARP): the switch adds and copies. Applies to all_reduce, reduce_scatter
    /// and all_gather, and needs [`crate::Determinism::Any`]. If a rank's memory is in no window,
    /// or the offset in the window differs between ranks, the same launch falls back to another
    /// algorithm. The CPU emulates multicast with a loop over the ranks.
    Nvls = 7,
    /// Two hops through packets: each rank reduces one shard, then gathers the shards of the other
    /// ranks.
    PacketTwoShot = 8,
}

impl Algorithm {
    /// Returns the algorithm with the code `code`, as `Algorithm as u8` gives it.
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        [
            Self::Auto,
            Self::Packet,
            Self::Signal,
            Self::TwoShot,
            Self::Pull,
            Self::Channel,
            Self::HandOff,
            Self::Nvls,
            Self::PacketTwoShot,
        ]
        .into_iter()
        .find(|algorithm| *algorithm as u8 == code)
    }

    /// Returns the name that `--algorithm` accepts.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Packet => "packet",
            Self::Signal => "signal",
            Self::TwoShot => "two_shot",
            Self::Pull => "pull",
            Self::Channel => "channel",
            Self::HandOff => "handed off",
            Self::Nvls => "nvls",
            Self::PacketTwoShot => "packet_two_shot",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
