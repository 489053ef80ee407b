//! Tests that need something which may be absent are skipped with a printed reason; the comma list
//! `FUSEWIRE_REQUIRE` turns such a skip into a failure.

/// Prints why a test that needs `what` is skipped.
///
/// # Panics
/// When `FUSEWIRE_REQUIRE` names `what`.
pub fn skip(what: &str, reason: &str) {
    let required = std::env::var("FUSEWIRE_REQUIRE").unwrap_or_default();
    assert!(
        !required.split(',').any(|name| name.trim() == what),
        "FUSEWIRE_REQUIRE names {what}, but: {reason}"
    );
    eprintln!("skipped ({what}): {reason}");
}

/// Whether `FUSEWIRE_FULL=1` asks for the whole grid instead of the chosen part.
pub fn full() -> bool {
    std::env::var("FUSEWIRE_FULL").is_ok_and(|value| value == "1")
}

/// Whether the library has Gloo, which ranks on several hosts need; else the test is skipped.
///
/// # Panics
/// As [`skip`].
pub fn has_gloo() -> bool {
    let names = fusewire::backend::backend_names();
    if names.iter().any(|name| name == "gloo") {
        return true;
    }
    skip("gloo", "this build is without it (--features gloo)");
    false
}
