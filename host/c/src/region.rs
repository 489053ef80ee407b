//! Memory of a communicator's windows.

use fusewire::{Registration, Tensor};

/// Memory in a window.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) tensor: Tensor,
    pub(crate) registration: Registration,
    /// True if the library allocated the memory.
    pub(crate) owned: bool,
}
