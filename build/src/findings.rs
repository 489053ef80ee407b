//! Violations with their source lines. Excludes device-scope accesses in Fusewire's own crates.

use crate::lines::{self, Frame, SourceMap};
use crate::verify::{self, Violation};
use crate::{Compilation, Image, Project, Result, Toolchain};

/// A violation with its source lines.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The violation.
    pub violation: Violation,
    /// The line in the kernel author's code or, if that is unknown, in Fusewire's own crates or in
    /// `core`. `None` if no line is known.
    pub line: Option<Frame>,
    /// For a barrier in divergent code, the line of the branch at which the lanes diverge.
    pub branch: Option<Frame>,
}

impl From<Violation> for Finding {
    fn from(violation: Violation) -> Self {
        Self {
            violation,
            line: None,
            branch: None,
        }
    }
}

/// The verifier's result for an image.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// All violations, except those that the crate exempts and the accesses counted in `library`.
    pub all: Vec<Finding>,
    /// Number of device-scope accesses in Fusewire's own crates. They are permitted.
    pub library: usize,
}

/// Checks an image. If there are violations, compiles the image again with line tables to find
/// their source lines.
///
/// Every kernel contains device-scope accesses from Fusewire's own crates: in the launch prologue,
/// in counters and in channels. These accesses are not violations. A device-scope access that the
/// kernel author writes through `fusewire_device::mem` is a violation. The source lines distinguish
/// the two cases.
///
/// # Errors
/// Returns the errors of [`crate::compile()`].
pub fn findings(
    toolchain: &Toolchain,
    project: &Project,
    compilation: &Compilation,
    image: &Image,
) -> Result<Findings> {
    if verify::check(image).is_empty() {
        return Ok(Findings::default());
    }
    let (image, map) = lines::annotate(toolchain, project, compilation, image)?;
    let all = verify::all(&image);
    let count = all.len();
    let own: Vec<Violation> = all
        .into_iter()
        .filter(|violation| !is_of_library(project, &map, violation))
        .collect();
    let library = count - own.len();
    let all = verify::without_allowed(own, &image.allow)
        .into_iter()
        .map(|violation| {
            let mut lines = violation.locations.iter();
            let mut line = || author_line(project, &map.frames(*lines.next()?));
            Finding {
                line: line(),
                branch: line(),
                violation,
            }
        })
        .collect();
    Ok(Findings { all, library })
}

fn is_of_library(project: &Project, map: &SourceMap, violation: &Violation) -> bool {
    violation.rule == verify::SCOPE
        && violation.locations.first().is_some_and(|&location| {
            // The caller of a memory operation chooses the scope. The search for the caller skips
            // the frames of the operation.
            let frames = map.frames(location);
            let caller = frames
                .iter()
                .find(|frame| !is_of_core(frame) && !is_memory_operation(project, frame));
            caller.is_some_and(|frame| project.is_library_file(&frame.file))
        })
}

/// Returns the innermost frame in the kernel author's code. If there is none, returns the outermost
/// frame.
pub(crate) fn author_line(project: &Project, frames: &[Frame]) -> Option<Frame> {
    let foreign = |frame: &&Frame| is_of_core(frame) || project.is_library_file(&frame.file);
    let own = frames.iter().find(|frame| !foreign(frame));
    own.or(frames.last()).cloned()
}

fn is_of_core(frame: &Frame) -> bool {
    frame.file.starts_with("/rustc/") || frame.file.contains("library/core/src/")
}

fn is_memory_operation(project: &Project, frame: &Frame) -> bool {
    project.is_library_file(&frame.file)
        && (frame.file.contains("/src/mem/") || frame.file.ends_with("/src/mem.rs"))
}
