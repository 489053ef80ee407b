//! For tests of the library and of kernels. No stable interface.

use crate::options::{Options, TestNetworkOptions};

/// Connects the ranks of a communicator on the CPU by a network for tests: kernels reach other
/// ranks by requests, which are delayed and reordered as `seed` says, and not by load and store.
pub fn connect_by_network(options: &mut Options, seed: u64) {
    connect_teams_by_network(options, 1, seed);
}

/// Does what [`connect_by_network`] does for ranks of different teams, of `team` successive ranks
/// each. The ranks of a team reach each other by load and store.
pub fn connect_teams_by_network(options: &mut Options, team: u32, seed: u64) {
    options.test_network = Some(TestNetworkOptions { team, seed });
}
