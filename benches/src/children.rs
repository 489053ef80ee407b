//! Runs child processes that print lines of numbers, with a time limit.

use core::time::Duration;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};

/// Measurement of one message size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figure {
    pub(crate) bytes: usize,
    pub(crate) median_ns: u64,
    pub(crate) wrong: u64,
}

/// Child processes, terminated when this value is dropped.
struct Group(Vec<Child>);

impl Drop for Group {
    fn drop(&mut self) {
        for child in &mut self.0 {
            if let Ok(None) = child.try_wait() {
                // A launcher that receives SIGTERM also terminates its ranks. After SIGKILL, the
                // launcher could not do that.
                if let Ok(id) = libc::pid_t::try_from(child.id()) {
                    // SAFETY: `kill` accesses no memory of this process. The child has not been
                    // waited for, so its id has not been reused.
                    unsafe { libc::kill(id, libc::SIGTERM) };
                }
                let asked = Instant::now();
                while matches!(child.try_wait(), Ok(None)) && asked.elapsed().as_secs() < 8 {
                    thread::sleep(Duration::from_millis(20));
                }
                let _ = child.kill();
            }
            let _ = child.wait();
        }
    }
}

/// Runs `commands` concurrently. The first command must print a line `bytes median_ns min_ns wrong`
/// for each size. Returns `None` if the commands do not exit within `limit`.
pub(crate) fn run(commands: Vec<Command>, limit: Duration) -> Result<Option<Vec<Figure>>> {
    let Some(lines) = numbers(commands, limit)? else {
        return Ok(None);
    };
    let figure = |line: Vec<u64>| {
        let [bytes, median_ns, _, wrong] = line[..] else {
            bail!("{line:?} is no line of four figures");
        };
        Ok(Figure {
            bytes: bytes as usize,
            median_ns,
            wrong,
        })
    };
    lines
        .into_iter()
        .map(figure)
        .collect::<Result<_>>()
        .map(Some)
}

/// Runs `commands` concurrently. Returns the numbers in each line that the first command prints, or
/// `None` if the commands do not exit within `limit`.
pub(crate) fn numbers(commands: Vec<Command>, limit: Duration) -> Result<Option<Vec<Vec<u64>>>> {
    let mut group = Group(Vec::new());
    for (index, mut command) in commands.into_iter().enumerate() {
        let output = if index == 0 {
            Stdio::piped()
        } else {
            Stdio::null()
        };
        let child = command
            .stdin(Stdio::null())
            .stdout(output)
            .spawn()
            .with_context(|| format!("start {}", command.get_program().display()))?;
        group.0.push(child);
    }
    let Some(mut output) = group.0.first_mut().and_then(|child| child.stdout.take()) else {
        bail!("nothing to run");
    };
    let (sender, receiver) = mpsc::channel();
    let reader = thread::spawn(move || {
        let mut text = String::new();
        let result = output.read_to_string(&mut text).map(|_| text);
        let _ = sender.send(result);
    });
    let Ok(text) = receiver.recv_timeout(limit) else {
        drop(group);
        let _ = reader.join();
        return Ok(None);
    };
    let text = text?;
    for child in &mut group.0 {
        let status = child.wait()?;
        if !status.success() {
            bail!("a rank or its launcher ended with {status}; it printed: {text}");
        }
    }
    let line = |line: &str| {
        let words = line.split_whitespace().map(str::parse);
        words
            .collect::<Result<_, _>>()
            .with_context(|| format!("\"{line}\" is no line of figures"))
    };
    text.lines().map(line).collect::<Result<_>>().map(Some)
}
