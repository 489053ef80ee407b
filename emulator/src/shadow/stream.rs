//! Order by operations of streams. An operation counts as a strong access with system scope by a
//! thread outside all devices.

use std::sync::{Arc, Mutex, PoisonError};

use super::Shadow;
use super::cell::{Bytes, Kind, Place, Read, bits};
use super::clock::{Knowledge, Thread};
use super::release::{Position, Release};
use crate::program::Scope;

const STREAM: Position = Position {
    thread: Thread::HOST,
    device: u32::MAX,
};

/// The number of times that the shadow had been cleared, and the events before the mark.
type Recorded = (u64, Arc<Knowledge>);

/// A CUDA event: the launches of a device that had ended when a stream recorded the event. Clones
/// are the same event.
#[derive(Clone, Debug, Default)]
pub struct Mark(Arc<Mutex<Option<Recorded>>>);

impl Mark {
    fn replace(&self, recorded: Recorded) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(recorded);
    }

    fn get(&self) -> Option<Recorded> {
        let recorded = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        recorded.clone()
    }
}

/// Returns the bytes of a word in its cell, and the position of its lowest bit.
fn word(place: Place) -> (Bytes, u32) {
    let shift = (place.offset % 8) as u32;
    (0xf << shift, 8 * shift)
}

impl Shadow {
    /// Sets a mark after the ended launches of a device.
    pub(crate) fn record(&mut self, device: u32, mark: &Mark) {
        mark.replace((self.world.cleared, self.world.ended(device)));
    }

    /// Orders what is before a mark before later launches of a device.
    pub(crate) fn wait_for(&mut self, device: u32, mark: &Mark) {
        // Accesses before the shadow was cleared are forgotten, so they need no order.
        if let Some((cleared, knowledge)) = mark.get()
            && cleared == self.world.cleared
        {
            self.world.add_ended(device, &knowledge);
        }
    }

    /// Acquires the value of a word, `memory`, for later launches of `device`.
    pub(crate) fn acquire_word(&mut self, device: u32, place: Place, memory: u32) {
        let (bytes, shift) = word(place);
        let cell = self.global.cell(place);
        cell.observe(bytes, u64::from(memory) << shift);
        let version = &cell.versions[cell.newest_of(bytes)];
        let writer = self.world.position(version.writer.thread);
        let is_strong = |scope| STREAM.mutual(Scope::Sys, writer, scope);
        if version.bytes != bytes
            || version.kind.alias
            || !version.kind.strong.is_some_and(is_strong)
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
        // Later accesses of the word are ordered after the write that the stream has read.
        let seen = version.order;
        cell.add_floor(Read {
            block: Thread::HOST.block,
            warp: 0,
            lanes: 1,
            time: 0,
            kind: Kind::HOST,
            bytes,
            pc: 0,
            seen,
        });
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
