//! Order by operations of streams. A stream is a thread that belongs to no device: its operations
//! are strong, and have the scope of the system.

use std::sync::Arc;

use super::Shadow;
use super::cell::{Bytes, Place, Version, bits};
use super::clock::{Knowledge, Thread};
use super::release::{Position, Release};
use crate::program::Scope;

const STREAM: Position = Position {
    thread: Thread::HOST,
    device: u32::MAX,
};

/// Returns the bytes of a word in its cell, and the position of its lowest bit.
fn word(place: Place) -> (Bytes, u32) {
    let shift = (place.offset % 8) as u32;
    (0xf << shift, 8 * shift)
}

impl Shadow {
    /// Orders the ended launches of a device before later launches of another one.
    pub(crate) fn order(&mut self, first: u32, then: u32) {
        let knowledge = self.world.ended(first);
        self.world.add_ended(then, &knowledge);
    }

    /// Acquires the newest write of `value` to a word, for later launches of `device`.
    pub(crate) fn acquire_word(&mut self, device: u32, place: Place, value: u32) {
        let (bytes, shift) = word(place);
        let cell = self.global.cell(place);
        let is_read = |it: &&Version| {
            it.bytes & bytes != 0 && (it.content & bits(bytes)) >> shift == u64::from(value)
        };
        let Some(version) = cell.versions.iter().rev().find(is_read) else {
            return;
        };
        let writer = self.world.position(version.writer.thread);
        let strong = version.kind.strong;
        if version.bytes != bytes || !strong.is_some_and(|it| STREAM.mutual(Scope::Sys, writer, it))
        {
            return;
        }
        let mut knowledge = Knowledge::default();
        if let Some(trail) = &version.trail {
            knowledge.consume(trail);
        }
        for release in &version.releases {
            if STREAM.mutual(Scope::Sys, release.by, release.scope) {
                knowledge.join(&release.knowledge);
            }
        }
        self.world.add_ended(device, &Arc::new(knowledge));
    }

    /// Adds a write of a word by a stream of `device`. `memory` is the value of the word before the
    /// write.
    pub(crate) fn release_word(&mut self, device: u32, place: Place, memory: u32, value: u32) {
        let (bytes, shift) = word(place);
        let knowledge = self.world.ended(device);
        let cell = self.global.cell(place);
        cell.observe(bytes, u64::from(memory) << shift);
        let content = cell.newest().content & !bits(bytes) | u64::from(value) << shift;
        let release = Release {
            by: STREAM,
            scope: Scope::Sys,
            knowledge,
        };
        cell.push_by_host(bytes, content, Some(Arc::new(release)));
    }
}
