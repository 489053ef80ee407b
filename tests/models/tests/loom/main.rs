//! Explores the protocols under loom: all interleavings and all stale reads that the C++ memory
//! model allows, within the bound that each line prints.

#[cfg(loom)]
mod controls;
#[cfg(loom)]
mod models;

#[cfg(loom)]
fn main() -> std::process::ExitCode {
    if std::env::var_os("FUSEWIRE_MUTANTS").is_some() {
        return fusewire_models::mutants::run(models::entries);
    }
    let entries = models::entries().into_iter().chain(controls::entries());
    fusewire_models::report::run("loom", entries.collect())
}

#[cfg(not(loom))]
fn main() {
    println!("skipped: needs --cfg loom, see tests/models/run.sh");
}
