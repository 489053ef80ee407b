//! Tests the file store with processes that are killed while they write.

use core::time::Duration;
use std::thread;

use fusewire::store::{FileStore, Store};
use fusewire_tests::process::{role, start};

const LONG: Duration = Duration::from_secs(30);

#[test]
fn a_file_survives_writers_that_are_killed() {
    let path = std::env::temp_dir().join("fusewire-file-store");
    if role().is_some() {
        let store = FileStore::open(std::env::var("STORE_FILE").unwrap()).unwrap();
        let value = vec![7; 100_000];
        loop {
            store.add("n", 1).unwrap();
            store.set("large", &value).unwrap();
            store.append("log", b"x").unwrap();
        }
    }
    let path = path.with_extension(std::process::id().to_string());
    let store = FileStore::open(&path).unwrap();
    let environment = [("STORE_FILE".to_owned(), path.display().to_string())];
    for round in 0..8u64 {
        let name = "a_file_survives_writers_that_are_killed";
        let writers = [
            start(name, "writer", &environment),
            start(name, "writer", &environment),
        ];
        let before = store.add("n", 0).unwrap();
        while store.add("n", 0).unwrap() < before + 10 {
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(Duration::from_micros(300 * round));
        // Dropping a process kills it with SIGKILL.
        drop(writers);
        let (n, log) = (store.add("n", 0).unwrap(), store.get("log", LONG).unwrap());
        // In each round, each of the two writers may have been killed after it changed `n` and
        // before it appended to `log`.
        let lost = n - log.len() as i64;
        assert!((0..=2 * (round as i64 + 1)).contains(&lost), "{n} {lost}");
        assert_eq!(store.get("large", LONG).unwrap(), vec![7; 100_000]);
        store.set("large", &[7; 100_000]).unwrap();
    }
    let again = FileStore::open(&path).unwrap();
    assert_eq!(again.add("n", 0).unwrap(), store.add("n", 0).unwrap());
    std::fs::remove_file(&path).unwrap();
}
