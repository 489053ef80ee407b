//! The protocols under loom: every interleaving and every stale read that C++ allows, within the bound that is
//! printed.

#[cfg(loom)]
mod table;

#[cfg(loom)]
fn main() -> std::process::ExitCode {
    fusewire_models::report::run("loom", table::entries())
}

#[cfg(not(loom))]
fn main() {
    println!("skipped: needs --cfg loom, see tests/models/run.sh");
}
