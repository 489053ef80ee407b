//! Handles of the driver library, as integers.

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $name(pub usize);
    )*};
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
