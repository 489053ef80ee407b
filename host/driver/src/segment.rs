//! Shared memory of the CPU device. The symmetric memory of each rank is an anonymous memory file
//! (memfd), which the peers of the rank map.
//!
//! A peer opens the file through `/proc/<pid>/fd/<fd>`. The file has no name in a file system, so
//! nothing remains when a process is killed. All users of a segment within a process share one
//! mapping. Ranks that are threads of one process therefore use the same addresses. Otherwise a
//! race detector could not detect races between these ranks.

mod descriptor;

use core::ffi::CStr;
use core::ptr::{self, NonNull};
use std::collections::HashMap;
use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::process;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

pub use self::descriptor::SegmentDescriptor;
use crate::process::{says_gone, start_time};
use crate::{Error, Result};

/// Minimum size in bytes of a mapping for which huge pages are requested.
const HUGE_PAGE: usize = 2 << 20;

/// Memory that several ranks map. [`Segment::create`] allocates a zeroed segment, and
/// [`Segment::open`] maps the segment of a peer. The mapping lives until this process drops the
/// last `Arc<Segment>`.
#[derive(Debug)]
pub struct Segment {
    start: NonNull<u8>,
    mapped: usize,
    device: u64,
    descriptor: SegmentDescriptor,
    /// The memory file, kept open by its creator. Peers open the file through this descriptor.
    /// `None` if a peer created the segment or if the memory is adopted.
    _file: Option<File>,
    /// True for adopted memory, which has no file and is not unmapped on drop.
    foreign: bool,
}

// SAFETY: the fields are immutable after construction and not tied to a thread, and the mapping is
// valid on every thread of the process. A `Segment` only exposes a raw pointer, and dereferencing
// the pointer is a separate `unsafe` operation of the caller.
unsafe impl Send for Segment {}
// SAFETY: no method mutates a field, and `munmap` runs in `drop`, which has exclusive access.
unsafe impl Sync for Segment {}

/// All live mappings of this process, by device and inode of the file.
type Cache = HashMap<(u64, u64), Weak<Segment>>;

fn cache() -> MutexGuard<'static, Cache> {
    static CACHE: OnceLock<Mutex<Cache>> = OnceLock::new();
    // A panic cannot leave the map inconsistent, because the map is valid after every statement. A
    // poisoned lock can therefore be used.
    CACHE
        .get_or_init(Mutex::default)
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

impl Segment {
    /// Creates a segment of `bytes` zeroed bytes, rounded up to whole pages and at least one page.
    /// `name` appears in `/proc/<pid>/maps` and need not be unique.
    ///
    /// # Errors
    /// [`Error::MemoryMap`] if a system call fails, [`Error::InvalidArgument`] if `bytes` exceeds
    /// the address space or `name` contains a zero byte.
    pub fn create(bytes: u64, name: &str) -> Result<Arc<Self>> {
        let invalid = |detail: String| Error::InvalidArgument {
            operation: "create segment",
            detail,
        };
        let mapped = mapped_bytes(bytes)
            .ok_or_else(|| invalid(format!("{bytes} bytes are more than can be mapped")))?;
        let c_name = CString::new(name)
            .map_err(|_| invalid(format!("the name {name:?} holds a zero byte")))?;
        let failed = |operation| {
            move |error: io::Error| Error::MemoryMap {
                operation,
                bytes,
                source: error.into(),
            }
        };
        let file = create_file(&c_name).map_err(failed("memfd_create"))?;
        check_file_limit(mapped as u64).map_err(failed("ftruncate"))?;
        file.set_len(mapped as u64).map_err(failed("ftruncate"))?;
        seal_size(&file).map_err(failed("sealing"))?;
        let metadata = file.metadata().map_err(failed("fstat"))?;
        let start = map(&file, mapped).map_err(failed("mmap"))?;
        let pid = process::id();
        let descriptor = SegmentDescriptor {
            pid,
            // An open descriptor is not negative.
            fd: file.as_raw_fd() as u32,
            bytes,
            inode: metadata.ino(),
            start_time: 0,
        };
        let mut segment = Self {
            start,
            mapped,
            device: metadata.dev(),
            descriptor,
            _file: Some(file),
            foreign: false,
        };
        segment.descriptor.start_time = start_time(pid).map_err(failed("reading /proc"))?;
        let segment = Arc::new(segment);
        cache().insert(segment.key(), Arc::downgrade(&segment));
        Ok(segment)
    }

    /// Maps the segment of `rank` that `descriptor` describes. Returns the existing mapping if this
    /// process has already created or mapped the segment.
    ///
    /// The descriptor may come from an untrusted store and could name any file. Therefore this
    /// function maps only anonymous memory files with a sealed size. It never maps an ordinary
    /// file.
    ///
    /// # Errors
    /// [`Error::PeerSegment`] if the process that created the segment has exited, if the file does
    /// not match the descriptor, or if the file is not a sealed memory file; [`Error::MemoryMap`]
    /// if the file cannot be mapped.
    pub fn open(descriptor: &SegmentDescriptor, rank: u32) -> Result<Arc<Self>> {
        let refused = |detail: String| Error::PeerSegment { rank, detail };
        let SegmentDescriptor {
            pid,
            fd,
            bytes,
            inode,
            start_time: expected_start,
        } = *descriptor;
        let mapped = mapped_bytes(bytes)
            .ok_or_else(|| refused(format!("its {bytes} bytes are more than can be mapped")))?;
        let path = format!("/proc/{pid}/fd/{fd}");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            // The descriptor could name a terminal or a device. The flags prevent the open call
            // from blocking and from acquiring a controlling terminal.
            .custom_flags(libc::O_NOCTTY | libc::O_NONBLOCK)
            .open(&path)
            .map_err(|error| {
                let advice = file_limit_advice(&error).unwrap_or(
                    "; the process must be running on this host, under the same user and in the \
                     same process id namespace (otherwise, give each container or host its own \
                     FUSEWIRE_HOST_ID)",
                );
                refused(format!("{path} cannot be opened ({error}){advice}"))
            })?;
        // The start time must be checked after the file is opened: if the start time matches now,
        // process `pid` was already the expected process when the file was opened.
        match start_time(pid) {
            Ok(found) if found == expected_start => {}
            Ok(_) => {
                return Err(refused(format!(
                    "process {pid} has ended, and another one has its id now"
                )));
            }
            Err(error) if says_gone(&error) => {
                return Err(refused(format!("process {pid} has ended ({error})")));
            }
            Err(error) => {
                let advice = file_limit_advice(&error).unwrap_or_default();
                return Err(refused(format!(
                    "the start time of process {pid} cannot be read ({error}){advice}"
                )));
            }
        }
        let metadata = file
            .metadata()
            .map_err(|error| refused(format!("{path} cannot be examined ({error})")))?;
        if metadata.ino() != inode || metadata.size() != mapped as u64 {
            return Err(refused(format!(
                "{path} is another file now (inode {} of {} bytes instead of {inode} of {mapped}); \
                 the segment was freed, or the rank is in another process id namespace (a \
                 container: set FUSEWIRE_HOST_ID apart)",
                metadata.ino(),
                metadata.size()
            )));
        }
        check_seals(&file).map_err(|found| {
            refused(format!(
                "{path} is no segment of this library ({found}); the descriptor came through the \
                 store: who else can write there? (FUSEWIRE_STORE_SECRET keeps others out)"
            ))
        })?;

        let key = (metadata.dev(), inode);
        let mut cache = cache();
        if let Some(segment) = cache.get(&key).and_then(Weak::upgrade) {
            // Unlocks the cache before returning, because dropping the last reference to a segment
            // locks the cache.
            drop(cache);
            return Ok(segment);
        }
        let start = map(&file, mapped).map_err(|error| Error::MemoryMap {
            operation: "mmap",
            bytes,
            source: error.into(),
        })?;
        let segment = Arc::new(Self {
            start,
            mapped,
            device: metadata.dev(),
            descriptor: *descriptor,
            _file: None,
            foreign: false,
        });
        cache.insert(key, Arc::downgrade(&segment));
        Ok(segment)
    }

    /// Wraps memory of this process that other code allocated. Peers cannot map adopted memory.
    ///
    /// # Safety
    /// `bytes` bytes at `start` must stay allocated as long as the returned [`Segment`] or a clone
    /// of it lives.
    pub unsafe fn adopt(start: NonNull<u8>, bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            start,
            mapped: 0,
            device: 0,
            descriptor: SegmentDescriptor {
                pid: process::id(),
                fd: 0,
                bytes,
                inode: 0,
                start_time: 0,
            },
            _file: None,
            foreign: true,
        })
    }

    /// Returns true if this is adopted memory, which peers cannot map.
    pub fn is_foreign(&self) -> bool {
        self.foreign
    }

    /// Returns the address of the first byte in this process. The address is page-aligned, except
    /// for adopted memory.
    pub fn ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns the size in bytes that was requested at creation.
    pub fn bytes(&self) -> u64 {
        self.descriptor.bytes
    }

    /// Returns the descriptor with which a peer can [`Segment::open`] this segment until the
    /// creator drops the segment.
    pub fn descriptor(&self) -> SegmentDescriptor {
        self.descriptor
    }

    fn key(&self) -> (u64, u64) {
        (self.device, self.descriptor.inode)
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if self.foreign {
            return;
        }
        let mut cache = cache();
        // After the last reference was dropped, another thread may have mapped the file again and
        // replaced the cache entry. The new entry must stay.
        if cache
            .get(&self.key())
            .is_some_and(|segment| segment.strong_count() == 0)
        {
            cache.remove(&self.key());
        }
        drop(cache);
        // SAFETY: `map` mapped this range with this length. Only `drop` unmaps it, and `drop` runs
        // once, when no reference to the segment remains.
        let result = unsafe { libc::munmap(self.start.as_ptr().cast(), self.mapped) };
        if result != 0 {
            let error = io::Error::last_os_error();
            tracing::warn!(%error, bytes = self.mapped, "a segment could not be unmapped");
        }
    }
}

/// Rounds `bytes` up to whole pages, and to at least one page. Returns `None` if the result exceeds
/// `isize::MAX`.
fn mapped_bytes(bytes: u64) -> Option<usize> {
    let page = page_bytes();
    let bytes = usize::try_from(bytes).ok()?.max(1);
    bytes
        .checked_next_multiple_of(page)
        .filter(|mapped| isize::try_from(*mapped).is_ok())
}

fn page_bytes() -> usize {
    // SAFETY: sysconf has no preconditions.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(page)
        .ok()
        .filter(|page| page.is_power_of_two())
        .unwrap_or(4096)
}

/// Fails if the process may not create a file of `bytes` bytes. The system would end the process by
/// SIGXFSZ.
fn check_file_limit(bytes: u64) -> io::Result<()> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is a writable `rlimit`.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) } == 0;
    if known && limit.rlim_cur < bytes {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!(
                "shared memory is a file, and files are limited to {} bytes: raise the limit by \
                 `ulimit -f unlimited`",
                limit.rlim_cur
            ),
        ));
    }
    Ok(())
}

/// Returns the remedy if a file could not be opened because too many files are open.
fn file_limit_advice(error: &io::Error) -> Option<&'static str> {
    match error.raw_os_error()? {
        libc::EMFILE => Some("; raise the limit on open files with `ulimit -n`"),
        libc::ENFILE => Some("; raise the limit of open files of this host (fs.file-max)"),
        _ => None,
    }
}

fn create_file(name: &CStr) -> io::Result<File> {
    // SAFETY: the name is a valid C string.
    let fd =
        unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `memfd_create` has just returned this descriptor, and no other code owns it.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// The seals of every segment: the size of the file is fixed, and no seal can be added or removed.
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// Checks that `file` is a memory file with the seals of a segment. The kernel may have added
/// further seals (`vm.memfd_noexec`). An ordinary file has no seals: `F_GET_SEALS` fails with
/// `EINVAL`. The error describes the seals that were found.
fn check_seals(file: &File) -> Result<(), String> {
    // SAFETY: `file` keeps the descriptor open during the call; F_GET_SEALS takes no argument and
    // writes no memory of this process.
    let found = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    match found {
        0.. if found & SEALS == SEALS => Ok(()),
        0.. => Err(format!(
            "a memory file with seals {found:#x}, not {SEALS:#x}"
        )),
        _ => Err("not a memory file".to_owned()),
    }
}

/// Seals the size of the file. If the owner could shrink the file, a peer that accesses its mapping
/// of the file would receive SIGBUS.
fn seal_size(file: &File) -> io::Result<()> {
    // SAFETY: `file` keeps the descriptor open during the call; F_ADD_SEALS takes an integer and
    // writes no memory of this process.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn map(file: &File, bytes: usize) -> io::Result<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the call maps an open file at an address that the kernel chooses, so it replaces no
    // existing mapping.
    let start = unsafe {
        libc::mmap(
            ptr::null_mut(),
            bytes,
            protection,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    if bytes >= HUGE_PAGE {
        // SAFETY: the range was just mapped. An error is ignored, because without huge pages
        // accesses are only slower.
        unsafe { libc::madvise(start, bytes, libc::MADV_HUGEPAGE) };
    }
    NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_shared_and_at_one_address() {
        let segment = Segment::create(5000, "fusewire-test").unwrap();
        assert_eq!(segment.bytes(), 5000);
        assert_eq!(segment.ptr() as usize % page_bytes(), 0);
        let bytes = SegmentDescriptor::from_bytes(&segment.descriptor().to_bytes()).unwrap();
        assert_eq!(bytes, segment.descriptor());
        let peer = Segment::open(&segment.descriptor(), 1).unwrap();
        assert_eq!(peer.ptr(), segment.ptr());
        // SAFETY: 5000 bytes are mapped, and only this thread uses them.
        unsafe {
            assert_eq!(segment.ptr().add(4999).read(), 0);
            segment.ptr().add(4999).write(7);
            assert_eq!(peer.ptr().add(4999).read(), 7);
        }
    }

    #[test]
    fn a_mapping_outlives_its_creator_and_goes_with_its_last_user() {
        let segment = Segment::create(3 << 20, "fusewire-test").unwrap();
        let key = segment.key();
        let peer = Segment::open(&segment.descriptor(), 1).unwrap();
        drop(segment);
        // SAFETY: the mapping lives as long as `peer`.
        unsafe { peer.ptr().write(1) };
        assert!(cache().contains_key(&key));
        drop(peer);
        assert!(!cache().contains_key(&key));
    }

    #[test]
    fn another_mapping_of_the_file_sees_the_writes() {
        // Maps the file again without the cache, like a peer process.
        let segment = Segment::create(64, "fusewire-test").unwrap();
        let path = format!("/proc/self/fd/{}", segment.descriptor().fd);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .unwrap();
        let other = map(&file, page_bytes()).unwrap();
        assert_ne!(other.as_ptr(), segment.ptr());
        // SAFETY: one page is mapped at both addresses, and only this thread uses the page.
        unsafe {
            segment.ptr().add(63).write_volatile(9);
            assert_eq!(other.as_ptr().add(63).read_volatile(), 9);
            libc::munmap(other.as_ptr().cast(), page_bytes());
        }
        assert!(file.set_len(0).is_err(), "the size is sealed");
    }

    #[test]
    fn zero_bytes_are_one_page() {
        let segment = Segment::create(0, "fusewire-test").unwrap();
        assert_eq!((segment.bytes(), segment.mapped), (0, page_bytes()));
        Segment::open(&segment.descriptor(), 0).unwrap();
    }

    #[test]
    fn stale_descriptors_name_the_rank() {
        let segment = Segment::create(100, "fusewire-test").unwrap();
        let good = segment.descriptor();
        let other = Segment::create(100, "fusewire-test").unwrap().descriptor();
        let stale = [
            SegmentDescriptor {
                pid: u32::MAX / 2,
                ..good
            },
            SegmentDescriptor {
                start_time: good.start_time + 1,
                ..good
            },
            SegmentDescriptor {
                inode: good.inode + 1,
                ..good
            },
            SegmentDescriptor {
                bytes: 1 << 20,
                ..good
            },
            SegmentDescriptor {
                bytes: u64::MAX,
                ..good
            },
            SegmentDescriptor {
                fd: 1 << 30,
                ..good
            },
            other,
        ];
        for descriptor in stale {
            let error = Segment::open(&descriptor, 3).unwrap_err();
            assert!(
                matches!(error, Error::PeerSegment { rank: 3, .. }),
                "{error}"
            );
            assert!(error.to_string().contains("rank 3"), "{error}");
        }
        Segment::open(&good, 3).unwrap();
    }

    /// Opens a segment when the process can open `free` further files. Returns the error.
    fn error_with_few_files(free: usize) -> String {
        let segment = Segment::create(100, "fusewire-test").unwrap();
        let limit = libc::rlimit {
            rlim_cur: 64,
            rlim_max: 64,
        };
        // SAFETY: `limit` is a readable `rlimit`.
        let status = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
        assert_eq!(status, 0);
        let mut files = Vec::new();
        while let Ok(file) = File::open("/dev/null") {
            files.push(file);
        }
        files.truncate(files.len() - free);
        let error = Segment::open(&segment.descriptor(), 3).unwrap_err();
        error.to_string()
    }

    /// Runs itself as a child process, because the limit applies to the whole process.
    #[test]
    fn a_lack_of_descriptors_does_not_mean_that_the_process_has_ended() {
        const FREE: &str = "FUSEWIRE_TEST_FREE_FILES";
        if let Ok(free) = std::env::var(FREE) {
            eprintln!("@@{}", error_with_few_files(free.parse().unwrap()));
            return;
        }
        // The first file is the segment, the second one is the status of its process.
        for (free, reason) in [("0", "cannot be opened"), ("1", "start time")] {
            let test = "segment::tests::a_lack_of_descriptors_does_not_mean_that_the_process_has_\
                        ended";
            let child = process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", test, "--nocapture", "--test-threads=1"])
                .env(FREE, free)
                .output()
                .unwrap();
            let output = String::from_utf8_lossy(&child.stderr);
            let error = output.lines().find_map(|line| line.strip_prefix("@@"));
            let error = error.unwrap_or_else(|| panic!("{output}"));
            assert!(
                error.contains(reason) && error.contains("ulimit -n"),
                "{error}"
            );
            let blames_peer = ["has ended", "must be running"].map(|part| error.contains(part));
            assert_eq!(blames_peer, [false; 2], "{error}");
        }
    }

    /// Returns a descriptor for an open file of this process, as if the file were a segment.
    fn describe(file: &File, bytes: u64) -> SegmentDescriptor {
        SegmentDescriptor {
            pid: process::id(),
            fd: file.as_raw_fd() as u32,
            bytes,
            inode: file.metadata().unwrap().ino(),
            start_time: start_time(process::id()).unwrap(),
        }
    }

    /// Opens two files with descriptors in which all fields are valid. Only the missing seals
    /// distinguish the files from segments.
    #[test]
    fn files_that_are_no_segments_are_never_mapped() {
        let path = std::env::temp_dir().join(format!("fusewire-private-{}", process::id()));
        let private = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .unwrap();
        std::fs::remove_file(&path).unwrap();
        private.set_len(4096).unwrap();
        let unsealed = create_file(c"fusewire-unsealed").unwrap();
        unsealed.set_len(4096).unwrap();
        for (file, reason) in [(&private, "not a memory file"), (&unsealed, "seals 0x0")] {
            let error = Segment::open(&describe(file, 4096), 2).unwrap_err();
            assert!(
                matches!(error, Error::PeerSegment { rank: 2, .. }),
                "{error}"
            );
            assert!(error.to_string().contains(reason), "{error}");
        }
        seal_size(&unsealed).unwrap();
        Segment::open(&describe(&unsealed, 4096), 2).unwrap();
    }

    #[test]
    fn impossible_segments_are_refused() {
        assert!(Segment::create(u64::MAX, "x").is_err());
        assert!(Segment::create(1, "a\0b").is_err());
    }

    #[test]
    fn threads_that_open_at_once_get_one_mapping() {
        let segment = Segment::create(4096, "fusewire-test").unwrap();
        let descriptor = segment.descriptor();
        let address = segment.ptr() as usize;
        std::thread::scope(|scope| {
            for rank in 0..8 {
                scope.spawn(move || {
                    for _ in 0..50 {
                        let mapped = Segment::open(&descriptor, rank).unwrap();
                        assert_eq!(mapped.ptr() as usize, address);
                    }
                });
            }
        });
    }
}
