//! Skips tests. A test whose requirement is missing prints the reason and returns. If the
//! comma-separated list `FUSEWIRE_REQUIRE` names the requirement, the test fails instead.

/// Prints the reason for skipping a test that needs `what`.
///
/// # Panics
/// Panics if `FUSEWIRE_REQUIRE` names `what`.
pub fn skip(what: &str, reason: &str) {
    let required = std::env::var("FUSEWIRE_REQUIRE").unwrap_or_default();
    assert!(
        !required.split(',').any(|name| name.trim() == what),
        "FUSEWIRE_REQUIRE names {what}, but: {reason}"
    );
    eprintln!("skipped ({what}): {reason}");
}

/// Returns true if `FUSEWIRE_FULL=1` selects the long form of the lists and the grid.
pub fn full() -> bool {
    std::env::var("FUSEWIRE_FULL").is_ok_and(|value| value == "1")
}

/// Returns true if this build has Gloo, which ranks on several hosts need. Skips the test
/// otherwise.
///
/// # Panics
/// Panics if Gloo is missing and `FUSEWIRE_REQUIRE` names it.
pub fn has_gloo() -> bool {
    let names = fusewire::backend::backend_names();
    if names.iter().any(|name| name == "gloo") {
        return true;
    }
    skip("gloo", "this build is without it (--features gloo)");
    false
}
