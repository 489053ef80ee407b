//! Call words: the description of a launch in one word, which ranks compare.

/// Declares [`Operation`] with a row for each operation: documentation, variant, code, name.
macro_rules! operations {
    ($($(#[$doc:meta])* $variant:ident = $code:literal, $name:literal;)*) => {
        /// The operations that a call word can name. The codes of collectives are below 32.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Operation {
            /// No operation yet.
            None = 0,
            $($(#[$doc])* $variant = $code,)*
        }

        impl Operation {
            /// All operations, without [`Operation::None`].
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// Returns the name in messages.
            pub const fn name(self) -> &'static str {
                match self {
                    Self::None => "nothing",
                    $(Self::$variant => $name,)*
                }
            }

            /// Returns the operation with this code.
            pub const fn from_code(code: u8) -> Self {
                match code {
                    $($code => Self::$variant,)*
                    _ => Self::None,
                }
            }
        }
    };
}

operations! {
    /// Element-wise reduction, result on every rank.
    AllReduce = 1, "all_reduce";
    /// Element-wise reduction, block r of the result on rank r.
    ReduceScatter = 2, "reduce_scatter";
    /// Every rank's input on every rank.
    AllGather = 3, "all_gather";
    /// all_gather with a count for each rank.
    AllGatherV = 4, "all_gather_v";
    /// The root's buffer on every rank.
    Broadcast = 5, "broadcast";
    /// Element-wise reduction, result on the root.
    Reduce = 6, "reduce";
    /// Block r of the root's input on rank r.
    Scatter = 7, "scatter";
    /// Every rank's input on the root.
    Gather = 8, "gather";
    /// Block r of every rank's input on rank r.
    AllToAll = 9, "all_to_all";
    /// all_to_all with a count for each pair.
    AllToAllV = 10, "all_to_all_v";
    /// All ranks have arrived.
    Barrier = 11, "barrier";
    /// all_reduce, residual add and norm in one launch.
    AllReduceNorm = 12, "all_reduce_norm";
    /// A user kernel.
    User = 13, "user kernel";
    /// reduce_scatter, residual add and norm in one launch.
    ReduceScatterNorm = 14, "reduce_scatter_norm";
    /// Greatest logits and log-sum-exp of logits that are split by columns.
    VocabParallel = 15, "vocab_parallel";
    /// all_gather with a ready flag per chunk.
    AllGatherWithFlags = 20, "all_gather_with_flags";
    /// reduce_scatter with an arrival counter per tile.
    ReduceScatterOnArrival = 21, "reduce_scatter_on_arrival";
    /// send to one peer.
    Send = 32, "send";
    /// recv from one peer.
    Recv = 33, "recv";
    /// Sends and receives of several peers, all at once.
    Batch = 34, "batch";
    /// put into a peer's part of a window.
    Put = 35, "put";
    /// get from a peer's part of a window.
    Get = 36, "get";
    /// Update of a peer's signal.
    Signal = 37, "signal";
    /// Wait for a signal of this rank.
    WaitSignal = 38, "wait_signal";
}

impl Operation {
    /// Returns true if the operation is a collective with more operands than an input and an
    /// output: flags and a second stream, or those of a fused computation.
    pub const fn is_fused(self) -> bool {
        matches!(
            self,
            Self::AllReduceNorm
                | Self::ReduceScatterNorm
                | Self::VocabParallel
                | Self::AllGatherWithFlags
                | Self::ReduceScatterOnArrival
        )
    }

    /// Returns true if the caller chooses the reduction.
    pub const fn reduces(self) -> bool {
        matches!(
            self,
            Self::AllReduce | Self::Reduce | Self::ReduceScatter | Self::ReduceScatterOnArrival
        )
    }

    /// Returns true if all ranks pass the same root.
    pub const fn is_rooted(self) -> bool {
        matches!(
            self,
            Self::Broadcast | Self::Reduce | Self::Scatter | Self::Gather
        )
    }

    /// Returns true if the operation accesses a window and the peer makes no call.
    pub const fn is_one_sided(self) -> bool {
        matches!(
            self,
            Self::Put | Self::Get | Self::Signal | Self::WaitSignal
        )
    }

    /// Returns true if all ranks take part.
    pub const fn is_collective(self) -> bool {
        self as u8 != 0 && (self as u8) < 32
    }
}

/// Description of a launch in one word.
///
/// ```text
/// [root or peer:16][..:8][operation:8][type:4][reduction:4][algorithm:8][fingerprint:16]
/// ```
///
/// The low 40 bits must be equal on all ranks of a collective. The fingerprint covers everything
/// that must be equal, the element count and the root included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Call(pub u64);

impl Call {
    /// Packs a call. `dtype`, `reduction` and `algorithm` are codes, 0 for none; `agreed` is
    /// another value that must be equal on all ranks, usually the element count.
    #[inline(always)]
    pub const fn new(
        operation: Operation,
        dtype: u8,
        reduction: u8,
        algorithm: u8,
        root: u16,
        agreed: u64,
    ) -> Self {
        let head = (operation as u64) << 32
            | (dtype as u64 & 15) << 28
            | (reduction as u64 & 15) << 24
            | (algorithm as u64) << 16;
        let mut hash = (head ^ (root as u64) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash = (hash ^ hash >> 29 ^ agreed).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        hash ^= hash >> 32;
        Self((root as u64) << 48 | head | (hash >> 8 & 0xffff))
    }

    /// Packs a call of the user kernel with code `kernel`, which is not 0. `agreed` is a hash of
    /// all else that must be equal on all ranks.
    #[inline(always)]
    pub const fn of_kernel(kernel: u16, agreed: u64) -> Self {
        let (high, low) = ((kernel >> 12) as u8, (kernel >> 8) as u8 & 15);
        Self::new(Operation::User, high, low, kernel as u8, 0xffff, agreed)
    }

    /// Returns the code of a user kernel, or `None` for other calls and for user kernels without a
    /// code.
    #[inline(always)]
    pub const fn kernel(self) -> Option<u16> {
        match (self.0 >> 16) as u16 {
            code if code != 0 && matches!(self.operation(), Operation::User) => Some(code),
            _ => None,
        }
    }

    /// Returns the call in a progress word (without its root).
    #[inline(always)]
    pub const fn from_progress(word: u64) -> Self {
        Self(word & 0xff_ffff_ffff)
    }

    /// Returns the operation.
    #[inline(always)]
    pub const fn operation(self) -> Operation {
        Operation::from_code((self.0 >> 32) as u8)
    }

    /// Returns true if this is a call of `operation`. A kernel compares codes: a match on
    /// [`Call::operation`] loads from a table.
    #[inline(always)]
    pub const fn is(self, operation: Operation) -> bool {
        (self.0 >> 32) as u8 == operation as u8
    }

    /// Returns the code of the element type.
    #[inline(always)]
    pub const fn dtype(self) -> u8 {
        (self.0 >> 28) as u8 & 15
    }

    /// Returns the code of the reduction.
    #[inline(always)]
    pub const fn reduction(self) -> u8 {
        (self.0 >> 24) as u8 & 15
    }

    /// Returns the code of the algorithm.
    #[inline(always)]
    pub const fn algorithm(self) -> u8 {
        (self.0 >> 16) as u8
    }

    /// Returns the root or peer.
    #[inline(always)]
    pub const fn root(self) -> u32 {
        (self.0 >> 48) as u32
    }

    /// Returns the hash of all that must be equal on all ranks.
    #[inline(always)]
    pub const fn fingerprint(self) -> u64 {
        self.0 & 0xffff
    }

    /// Returns true if all ranks take part.
    #[inline(always)]
    pub const fn is_collective(self) -> bool {
        (self.0 >> 32) as u8 != 0 && ((self.0 >> 32) as u8) < 32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_words_name_every_operation() {
        for (at, &operation) in Operation::ALL.iter().enumerate() {
            let call = Call::new(operation, 0, 0, 0, 0, 0);
            assert_eq!(call.operation(), operation);
            assert_eq!(call.is_collective(), operation.is_collective());
            let mut others = Operation::ALL[..at].iter();
            assert!(others.all(|other| other.name() != operation.name()));
        }
    }
}
