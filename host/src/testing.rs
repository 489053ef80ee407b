//! For tests of the library and of kernels. No stable interface.

use crate::options::Options;

/// Connects the ranks of a communicator on the CPU by a network for tests: kernels reach other
/// ranks' windows by requests, which are delayed and reordered as `seed` says, and not by load and
/// store.
pub fn connect_by_network(options: &mut Options, seed: u64) {
    options.test_network = Some(seed);
}
