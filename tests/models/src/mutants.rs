//! Mutants: each memory operation of the device API that asks for an order is made relaxed, once,
//! and a model must fail. For a word that peers access, loom's memory treats a scope that is too
//! narrow like a relaxed operation, so a mutant stands for both mistakes.
//!
//! Operations that no model misses are listed in `survivors.txt`, each with the reason. An
//! operation that survives and is not listed, or is listed and does not survive, is an error.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use fusewire_device::mem::model::{Fault, Site};

use crate::report::{self, Entry};

/// Time for which a model is explored to learn which operations it executes.
const LOOK: Duration = Duration::from_millis(300);
/// Time for which a model is explored with a mutant.
const LIMIT: Duration = Duration::from_secs(3);

/// A memory operation: its file, line, and the text of the line.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Operation {
    file: String,
    line: u32,
    text: String,
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(file: &str) -> String {
    let path = workspace().join(file);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the operations of a file that ask for an order.
fn operations(file: &str) -> Vec<Operation> {
    let text = read(file);
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    let calls = code.match_indices("mem::").filter_map(|(at, _)| {
        let call = &code[at..];
        let name = &call[5..call.find('(')?];
        let is_operation = [
            "load_u",
            "store_u",
            "fetch_add",
            "exchange",
            "compare_ex",
            "fence",
            "complete",
        ]
        .iter()
        .any(|start| name.starts_with(start));
        let mut depth = 0;
        let end = call.char_indices().find_map(|(index, letter)| {
            depth += i32::from(letter == '(') - i32::from(letter == ')');
            (letter == ')' && depth == 0).then_some(index)
        })?;
        // An order by name, or by a variable or constant that is one on the CPU.
        let orders = [
            "Order::Acquire",
            "Order::Release",
            "Order::AcqRel",
            " order,",
            " mem::AT_BEGIN,",
            " mem::AT_END,",
            "complete()",
        ];
        let is_ordered = orders.iter().any(|order| call[..=end].contains(order));
        let line = code[..=at].lines().count();
        (is_operation && is_ordered).then(|| Operation {
            file: file.to_owned(),
            line: line as u32,
            text: code
                .lines()
                .nth(line - 1)
                .unwrap_or_default()
                .trim()
                .to_owned(),
        })
    });
    calls.collect()
}

/// Returns the Rust files of the device API whose operations are in models.
fn files(folder: &Path, out: &mut Vec<String>) {
    let entries = std::fs::read_dir(folder).expect("a folder of sources");
    for path in entries.map(|entry| entry.expect("an entry").path()) {
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or("");
        if path.is_dir() && !["mem", "arch", "native", "multimem"].contains(&name) {
            files(&path, out);
        } else if name.ends_with(".rs") && name != "tests.rs" {
            let path = path.strip_prefix(workspace()).expect("in the workspace");
            out.push(path.to_str().expect("UTF-8").to_owned());
        }
    }
}

/// Returns the operations that `survivors.txt` lists, with the reasons.
fn listed() -> BTreeMap<(String, String), String> {
    read("tests/models/survivors.txt")
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty())
        .map(|line| {
            let parts: Vec<&str> = line.split(" | ").collect();
            let [file, text, reason] = parts[..] else {
                panic!("survivors.txt: not `file | line | reason`: {line}");
            };
            ((file.to_owned(), text.to_owned()), reason.to_owned())
        })
        .collect()
}

/// Weakens every operation once, prints one line each, and returns failure if the survivors are not
/// the listed ones. `FUSEWIRE_MUTANTS` limits the run to operations whose line contains it.
pub fn run(entries: fn() -> Vec<Entry>) -> ExitCode {
    report::quieten();
    let filter = std::env::var("FUSEWIRE_MUTANTS").unwrap_or_default();
    // Which models execute an operation.
    let count = entries().len();
    let mut models: BTreeMap<(String, u32), Vec<(Site, usize)>> = BTreeMap::new();
    for (index, entry) in entries().into_iter().enumerate() {
        let look = thread::spawn(move || entry.explore_with(None, LOOK));
        let (failure, sites) = look.join().expect("a model");
        assert_eq!(failure, None, "model {index} fails without a mutant");
        for site in sites {
            let place = (site.file().to_owned(), site.line());
            models.entry(place).or_default().push((site, index));
        }
    }
    let mut sources = Vec::new();
    files(&workspace().join("device-api/src"), &mut sources);
    sources.sort();
    let all: Vec<Operation> = sources.iter().flat_map(|file| operations(file)).collect();
    let chosen: VecDeque<Operation> = all
        .iter()
        .filter(|operation| filter == "1" || operation.text.contains(&filter))
        .cloned()
        .collect();
    println!(
        "mutants: {} of {} operations, {count} models",
        chosen.len(),
        all.len()
    );
    let (queue, survivors) = (Mutex::new(chosen), Mutex::new(Vec::new()));
    let workers = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let next = queue
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .pop_front();
                    let Some(operation) = next else {
                        return;
                    };
                    let place = (operation.file.clone(), operation.line);
                    let found = models.get(&place).map_or(&[][..], Vec::as_slice);
                    let caught = found.iter().find_map(|&(site, index)| {
                        let entry = entries().swap_remove(index);
                        let name = entry.name.clone();
                        let fault = Some(Fault::Weakened(site));
                        let run = thread::spawn(move || entry.explore_with(fault, LIMIT));
                        match run.join() {
                            Ok((None, _)) => None,
                            _ => Some(name),
                        }
                    });
                    let Operation { file, line, text } = &operation;
                    match caught {
                        Some(model) => println!("mutants: caught {file}:{line}: {text}: {model}"),
                        None => {
                            let models = found.len();
                            println!("mutants: SURVIVES {models} models {file}:{line}: {text}");
                            survivors
                                .lock()
                                .unwrap_or_else(PoisonError::into_inner)
                                .push((file.clone(), text.clone()));
                        }
                    }
                }
            });
        }
    });
    let survivors = survivors
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    let listed = listed();
    let mut errors = 0;
    for survivor in &survivors {
        if !listed.contains_key(survivor) {
            println!("mutants: not listed: {} | {}", survivor.0, survivor.1);
            errors += 1;
        }
    }
    for place in listed
        .keys()
        .filter(|place| filter == "1" && !survivors.contains(place))
    {
        println!("mutants: listed, but caught: {} | {}", place.0, place.1);
        errors += 1;
    }
    println!(
        "mutants: {} survive, {errors} not as listed",
        survivors.len()
    );
    ExitCode::from(u8::from(errors > 0))
}
