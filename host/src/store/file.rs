//! A store in a file, for processes of one machine or over one shared file system.
//!
//! The file is a log: a header, then one record for each change. A caller locks the file with
//! `flock`, reads what others have written since, and, for a change, appends one record. The kernel
//! gives the lock back when a process dies; what it had not finished writing is cut off by the next
//! writer, for a record counts only with its length and its checksum.

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

/// Kind, length of key, length of value, checksum.
const RECORD_HEAD: usize = 1 + 4 + 4 + 8;

const SET: u8 = 1;
const DELETE: u8 = 2;
const APPEND: u8 = 3;

/// A store in a file that processes share. It lives as long as the file; the values in it survive a
/// process that is killed.
///
/// Use a new path for each job: keys of an earlier one would be taken for this one's. Over a
/// network file system it needs locks that work (NFS version 4).
#[derive(Debug)]
pub struct FileStore {
    path: PathBuf,
    log: Mutex<Log>,
}

#[derive(Debug)]
struct Log {
    file: File,
    table: Table,
    /// Offset of the end of the records that are in `table`.
    end: u64,
}

/// An exclusive lock of the file, given back when dropped.
struct FileLock<'a>(&'a File);

impl FileStore {
    /// Opens the store at `path`, or makes it, readable for this user alone.
    ///
    /// # Errors
    /// [`Error::Store`] when the file cannot be opened, or is something else.
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
            .map_err(|error| Error::store_io("open", &path.to_string_lossy(), error))?;
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

    /// Runs `call` with the file locked and everything read that others have written.
    fn with<R>(
        &self,
        operation: &'static str,
        key: &str,
        call: impl FnOnce(&mut Log) -> Result<R, Failure>,
    ) -> Result<R> {
        // The table is taken in record by record, so a panic of another thread does not spoil it.
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let file = log.file.try_clone();
        file.map_err(Failure::Io)
            .and_then(|file| {
                let _locked = FileLock::new(&file)?;
                log.catch_up()?;
                call(&mut log)
            })
            .map_err(|failure| match failure {
                Failure::Io(error) => Error::store_io(operation, key, error),
                Failure::Detail(detail) => Error::store(operation, key, detail),
            })
    }

    /// Looks at the file again and again until all keys are there, then runs `call`.
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
                return Err(Error::StoreTimeout {
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
    /// Takes in the records that are new.
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
                // New, or of a process that was killed while it made it.
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
        // `length` is the size of the file, so this allocates no more than the file holds.
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

    /// Appends one record and takes it in.
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
        // After `end` there can only be the unfinished record of a process that was killed.
        self.file.set_len(self.end)?;
        self.file.write_all_at(&bytes, self.end)?;
        self.catch_up()
    }
}

/// The record at the start of `bytes`, if it is whole: kind, key, value, and its size.
fn record(bytes: &[u8]) -> Option<(u8, &[u8], &[u8], usize)> {
    let (head, rest) = bytes.split_at_checked(RECORD_HEAD)?;
    let number = |at: usize| Some(u32::from_le_bytes(head[at..at + 4].try_into().ok()?) as usize);
    let (key, rest) = rest.split_at_checked(number(1)?)?;
    let (value, _) = rest.split_at_checked(number(5)?)?;
    let sum = u64::from_le_bytes(head[9..17].try_into().ok()?);
    let whole = sum == checksum(head[0], key, value);
    whole.then_some((head[0], key, value, RECORD_HEAD + key.len() + value.len()))
}

/// FNV-1a over all parts. It has to be equal in all processes, and need not resist an enemy.
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
            // SAFETY: `file` keeps the descriptor open during the call, which touches no memory.
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
        // SAFETY: the descriptor is that of a live file. Unlocking a lock that is held does not
        // fail.
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
