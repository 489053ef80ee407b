//! Memory of a communicator's windows.

use fusewire::{Registration, Tensor};

/// Memory in a window.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) tensor: Tensor,
    /// Registration by `fusewire_alloc` or `fusewire_register`. Memory of `fusewire_window_alloc`
    /// has none, because its window ends it.
    pub(crate) registration: Option<Registration>,
    /// True if the library allocated the memory.
    pub(crate) owned: bool,
}
