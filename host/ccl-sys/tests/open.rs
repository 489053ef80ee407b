//! Opens libraries: a missing library, an unrelated library, and the real NCCL.

use std::path::Path;

use fusewire_ccl_sys::{Error, Kind, Library};

#[test]
fn missing_library_names_what_was_tried() {
    let error = Library::open(Kind::Rccl, Some(Path::new("/nowhere/librccl.so"))).unwrap_err();
    let text = error.to_string();
    assert!(
        matches!(
            error,
            Error::Open {
                kind: Kind::Rccl,
                ..
            }
        ),
        "{error:?}"
    );
    for part in ["/nowhere/librccl.so", "No such file", "FUSEWIRE_RCCL_PATH"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn other_library_lacks_the_symbols() {
    let error = Library::open(Kind::Nccl, Some(Path::new("libc.so.6"))).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Symbol {
                symbol: "ncclGetVersion",
                ..
            }
        ),
        "{error:?}"
    );
}

/// Expects an error on a machine without a GPU. On a machine with a GPU, creates a communicator of
/// one rank.
#[test]
fn real_nccl() {
    let library = match Library::open(Kind::Nccl, None) {
        Ok(library) => library,
        Err(error) => return skip("nccl", &error.to_string()),
    };
    println!(
        "{} {}: {}",
        library.path(),
        library.version(),
        library.features()
    );
    assert_eq!(library.version().parts().0, 2);
    assert!(library.features().has("ncclCommSplit"));
    let again = Library::open(Kind::Nccl, None).unwrap();
    assert!(core::ptr::eq(library.as_raw(), again.as_raw()));
    let id = match library.unique_id() {
        Ok(id) => id,
        Err(error) => {
            println!("{error}");
            assert!(matches!(error, Error::Call(_)));
            return;
        }
    };
    assert!(id.internal.iter().any(|byte| *byte != 0));
    match library.init_rank(1, id, 0) {
        Ok(comm) => assert_eq!((comm.count(), comm.rank()), (1, 0)),
        Err(Error::Call(failure)) => {
            println!("{failure}");
            assert_eq!(failure.operation, "ncclCommInitRank");
            assert!(!failure.name.is_empty());
        }
        Err(other) => panic!("{other}"),
    }
}

/// Prints the reason for a skipped test; fails instead if `FUSEWIRE_REQUIRE` contains `what`.
fn skip(what: &str, reason: &str) {
    let required = std::env::var("FUSEWIRE_REQUIRE").unwrap_or_default();
    assert!(
        !required.split(',').any(|name| name.trim() == what),
        "FUSEWIRE_REQUIRE names {what}, but: {reason}"
    );
    eprintln!("skipped ({what}): {reason}");
}
