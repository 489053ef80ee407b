//! A store in a file, for processes on one machine or on machines with a shared file system.
//!
//! The file is a log: a header, then one record for each change. Each call locks the file with
//! `flock`, reads the records that other processes have appended, and, for a change, appends one
//! record. When a process dies, the operating system releases its lock. A record that the process
//! had not finished is invalid, because its length or its checksum does not match, and the next
//! writer removes it.

use core::time::Duration;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use super::Store;
use super::table::Table;
use super::wire::{MAX_KEY_BYTES, MAX_VALUE_BYTES};
use crate::{Error, Result};

const HEADER: &[u8; 16] = b"fusewire-store1\n";

/// Size of the fields before the key: kind, length of the key, length of the value, checksum.
const RECORD_HEAD: usize = 1 + 4 + 4 + 8;

const SET: u8 = 1;
const DELETE: u8 = 2;
const APPEND: u8 = 3;

/// A store in a file that several processes share. The store exists as long as the file does, so
/// its values survive when a process is killed.
///
/// Use a new path for each job. In a file of an earlier job, ranks would find the keys of that job.
/// A network file system must support `flock` between machines, as NFS version 4 does.
#[derive(Debug)]
pub struct FileStore {
    path: PathBuf,
    log: Mutex<Log>,
}

#[derive(Debug)]
struct Log {
    file: File,
    table: Table,
    /// File offset after the last record that is in `table`.
    end: u64,
}

/// An exclusive lock on the file, released on drop.
struct FileLock<'a>(&'a File);

impl FileStore {
    /// Opens the store at `path`, or creates it with read and write permission for this user only.
    ///
    /// # Errors
    /// [`Error::Call`] when the file cannot be opened, or is not a store.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path)
            .map_err(|error| Error::io("open", &path.to_string_lossy(), error))?;
        let store = Self {
            log: Mutex::new(Log {
                file,
                table: Table::default(),
                end: 0,
            }),
            path,
        };
        store.with("open", "", |_| Ok(()))?;
        Ok(store)
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `call` with the file locked, after all records of other processes have been read.
    fn with<R>(
        &self,
        operation: &'static str,
        key: &str,
        call: impl FnOnce(&mut Log) -> Result<R, Failure>,
    ) -> Result<R> {
        // Each record is applied to the table as a whole, so the table is valid even if another
        // thread panicked with the lock held.
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let file = log.file.try_clone();
        file.map_err(Failure::Io)
            .and_then(|file| {
                let _locked = FileLock::new(&file)?;
                log.catch_up()?;
                call(&mut log)
            })
            .map_err(|failure| match failure {
                Failure::Io(error) => Error::io(operation, key, error),
                Failure::Detail(detail) => Error::call(operation, key, detail),
            })
    }

    /// Polls the file until all keys exist, then runs `call`.
    fn wait_then<R>(
        &self,
        operation: &'static str,
        keys: &[&str],
        timeout: Duration,
        call: impl Fn(&Table) -> R,
    ) -> Result<R> {
        let start = Instant::now();
        let mut pause = Duration::from_micros(50);
        loop {
            let first = keys.first().copied().unwrap_or_default();
            let found = self.with(operation, first, |log| {
                let missing = keys.iter().find(|key| !log.table.contains(key.as_bytes()));
                Ok(missing.map_or_else(|| Ok(call(&log.table)), |key| Err(*key)))
            })?;
            let missing = match found {
                Ok(answer) => return Ok(answer),
                Err(missing) => missing,
            };
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(Error::Timeout {
                    key: missing.to_owned(),
                    seconds: timeout.as_secs_f64(),
                });
            }
            thread::sleep(pause.min(left));
            pause = (pause * 2).min(Duration::from_millis(5));
        }
    }
}

enum Failure {
    Io(io::Error),
    Detail(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<String> for Failure {
    fn from(detail: String) -> Self {
        Self::Detail(detail)
    }
}

impl Log {
    /// Reads the records after `end` and applies them to the table.
    fn catch_up(&mut self) -> Result<(), Failure> {
        let length = self.file.metadata()?.len();
        if self.end == 0 {
            let mut header = [0; HEADER.len()];
            let there = length.min(HEADER.len() as u64) as usize;
            self.file.read_exact_at(&mut header[..there], 0)?;
            if header[..there] != HEADER[..there] {
                return Err("the file is no store".to_owned().into());
            }
            if there < HEADER.len() {
                // The file is new, or its creator was killed before it had written the whole
                // header.
                self.file.write_all_at(HEADER, 0)?;
            }
            self.end = HEADER.len() as u64;
        }
        if length < self.end {
            if length > HEADER.len() as u64 {
                return Err("the file has become shorter".to_owned().into());
            }
            return Ok(());
        }
        // `length` is the current size of the file, so the buffer is no larger than the file.
        let mut bytes = vec![0; (length - self.end) as usize];
        self.file.read_exact_at(&mut bytes, self.end)?;
        let mut at = 0;
        while let Some((kind, key, value, size)) = record(&bytes[at..]) {
            match kind {
                SET => self.table.set(key, value),
                APPEND => self.table.append(key, value),
                _ => drop(self.table.delete(key)),
            }
            at += size;
        }
        self.end += at as u64;
        Ok(())
    }

    /// Appends one record and applies it to the table.
    fn write(&mut self, kind: u8, key: &[u8], value: &[u8]) -> Result<(), Failure> {
        if key.len() as u64 > MAX_KEY_BYTES || value.len() as u64 > MAX_VALUE_BYTES {
            return Err(format!(
                "key of {} bytes and value of {} bytes; the limits are {MAX_KEY_BYTES} and \
                 {MAX_VALUE_BYTES}",
                key.len(),
                value.len()
            )
            .into());
        }
        let mut bytes = Vec::with_capacity(RECORD_HEAD + key.len() + value.len());
        bytes.push(kind);
        bytes.extend((key.len() as u32).to_le_bytes());
        bytes.extend((value.len() as u32).to_le_bytes());
        bytes.extend(checksum(kind, key, value).to_le_bytes());
        bytes.extend(key);
        bytes.extend(value);
        // Only an unfinished record of a process that was killed can follow `end`. Remove it.
        self.file.set_len(self.end)?;
        self.file.write_all_at(&bytes, self.end)?;
        self.catch_up()
    }
}

/// Returns the kind, the key, the value and the size of the record at the start of `bytes`, or
/// `None` if the record is incomplete or its checksum is wrong.
fn record(bytes: &[u8]) -> Option<(u8, &[u8], &[u8], usize)> {
    let (head, rest) = bytes.split_at_checked(RECORD_HEAD)?;
    let number = |at: usize| Some(u32::from_le_bytes(head[at..at + 4].try_into().ok()?) as usize);
    let (key, rest) = rest.split_at_checked(number(1)?)?;
    let (value, _) = rest.split_at_checked(number(5)?)?;
    let sum = u64::from_le_bytes(head[9..17].try_into().ok()?);
    let whole = sum == checksum(head[0], key, value);
    whole.then_some((head[0], key, value, RECORD_HEAD + key.len() + value.len()))
}

/// Returns the FNV-1a hash of all parts of a record. The hash must be the same in all processes,
/// but need not resist deliberate collisions.
fn checksum(kind: u8, key: &[u8], value: &[u8]) -> u64 {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01B3);
    let lengths = (key.len() as u64) << 32 | value.len() as u64;
    let head = [kind].into_iter().chain(lengths.to_le_bytes());
    let sum = head.fold(0xCBF2_9CE4_8422_2325, |sum, byte| step(sum, &byte));
    value.iter().fold(key.iter().fold(sum, step), step)
}

impl<'a> FileLock<'a> {
    fn new(file: &'a File) -> io::Result<Self> {
        loop {
            // SAFETY: `file` keeps the descriptor open during the call, and `flock` accesses no
            // memory of this process.
            if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) } == 0 {
                return Ok(Self(file));
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
}

impl Drop for FileLock<'_> {
    fn drop(&mut self) {
        // SAFETY: the borrowed file keeps the descriptor open, and `flock` accesses no memory of
        // this process. Releasing a lock that is held does not fail.
        unsafe { libc::flock(self.0.as_raw_fd(), libc::LOCK_UN) };
    }
}

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.with("set", key, |log| log.write(SET, key.as_bytes(), value))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.wait_then("get", &[key], timeout, |table| {
            table.get(key.as_bytes()).unwrap_or_default().to_vec()
        })
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.wait_then("wait", keys, timeout, |_| ())
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.with("add", key, |log| {
            let sum = log.table.sum(key.as_bytes(), amount)?;
            log.write(SET, key.as_bytes(), sum.to_string().as_bytes())?;
            Ok(sum)
        })
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.with("compare_set", key, |log| {
            match log.table.compare(key.as_bytes(), expected) {
                Ok(()) => {
                    log.write(SET, key.as_bytes(), desired)?;
                    Ok(desired.to_vec())
                }
                Err(answer) => Ok(answer),
            }
        })
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let first = keys.first().copied().unwrap_or_default();
        self.with("check", first, |log| {
            Ok(keys.iter().all(|key| log.table.contains(key.as_bytes())))
        })
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.with("delete", key, |log| {
            let there = log.table.contains(key.as_bytes());
            if there {
                log.write(DELETE, key.as_bytes(), &[])?;
            }
            Ok(there)
        })
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.with("append", key, |log| {
            log.write(APPEND, key.as_bytes(), value)
        })
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.wait_then("multi_get", keys, timeout, |table| {
            let value = |key: &&str| table.get(key.as_bytes()).unwrap_or_default().to_vec();
            keys.iter().map(value).collect()
        })
    }

    fn num_keys(&self) -> Result<u64> {
        self.with("num_keys", "", |log| Ok(log.table.len() as u64))
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        self.with("list_keys", "", |log| Ok(log.table.text_keys()))
    }
}
