//! Handles of the driver library, as integers.

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $name(pub(crate) usize);

        impl $name {
            /// Wraps a handle of the driver library.
            ///
            /// # Safety
            /// The value must be a live handle of this kind, of the library and the context of
            /// every driver to which it is passed. It must not be passed to a driver after it has
            /// been destroyed.
            pub const unsafe fn from_raw(handle: usize) -> Self {
                Self(handle)
            }

            /// Returns the handle of the driver library.
            pub const fn as_raw(self) -> usize {
                self.0
            }
        }
    )*};
}

impl RawStream {
    /// The legacy default stream, which exists in every context. It waits for the work of all
    /// blocking streams of the context, and they wait for its work. PyTorch's default stream is
    /// this stream.
    pub const LEGACY: Self = Self(0);
    /// The default stream of the calling thread. The handle refers to a different stream on
    /// each thread.
    pub const PER_THREAD: Self = Self(2);
}

handles! {
    /// A stream (`CUstream`, `hipStream_t`).
    RawStream;
    /// An event (`CUevent`, `hipEvent_t`).
    RawEvent;
    /// A module (`CUmodule`, `hipModule_t`).
    RawModule;
    /// A kernel of a module (`CUfunction`, `hipFunction_t`).
    RawFunction;
    /// A graph (`CUgraph`, `hipGraph_t`).
    RawGraph;
    /// An instantiated graph (`CUgraphExec`, `hipGraphExec_t`).
    RawGraphExec;
}
