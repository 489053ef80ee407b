//! Multicast addresses of windows: one store reaches every rank's part through the NVLink switch.
//!
//! The peer info of the rendezvous determines whether multicast is possible: each rank needs a GPU
//! of its own, and every GPU needs multicast. If it is not possible, windows exchange nothing. If
//! it is, all ranks take part in every step and exchange its result through the store. If one rank
//! cannot continue, no rank gets a multicast address, and the window works without one.

use std::collections::HashSet;
use std::sync::Arc;

use super::host_calls::HostCall;
use super::rendezvous::PeerInfo;
use super::windows::WindowPart;
use crate::gpu::driver::{RawMemory, RawMulticast};
use crate::gpu::{Multicast, Offer};
use crate::{Error, Result};

/// Returns true if the ranks with this peer info can be parts of one multicast object.
pub(super) fn is_possible(infos: &[PeerInfo]) -> bool {
    let mut gpus = HashSet::new();
    infos.len() > 1
        && infos.iter().all(|info| {
            let own = |uuid| gpus.insert(uuid);
            info.memory.has_multicast() && info.memory.uuid().is_some_and(own)
        })
}

impl HostCall<'_> {
    /// Creates a multicast object over every rank's part of the call's window `at`, if the switch
    /// and all ranks support it. Each rank's part must begin at the start of its memory (offset 0).
    /// A rank that has no part passes `None`. All ranks must call this together.
    ///
    /// # Errors
    /// The errors of the store. A refusal by a driver is not an error.
    pub(super) fn multicast(
        &self,
        at: usize,
        own: Option<&WindowPart>,
    ) -> Result<Option<Multicast>> {
        let comm = self.comm;
        let Some(on_gpu) = comm
            .inner
            .executor
            .on_gpu
            .as_ref()
            .filter(|_| comm.inner.windows.multicast)
        else {
            return Ok(None);
        };
        let (gpu, driver) = (on_gpu.gpu(), on_gpu.gpu().driver());
        // Memory allocated outside this library, or a part of an allocation, gets no multicast
        // address.
        let whole = own.and_then(|(memory, offset)| memory.whole().filter(|_| *offset == 0));
        let hold = |raw: RawMulticast| Multicast {
            gpu: Arc::clone(gpu),
            raw,
            address: 0,
        };
        // Rank 0 creates and offers the object; the other ranks report whether they have memory for
        // it.
        let mut made = None;
        let mut offer = None;
        if let Some(memory) = whole.filter(|_| comm.rank() == 0) {
            let object = driver.create_multicast(memory.bytes, comm.size()).map(hold);
            match object.map_err(Error::from).and_then(|object| {
                let export = driver.export_multicast(&object.raw)?;
                Ok((Offer::new(export)?, object))
            }) {
                Ok((given, object)) => {
                    let mut bytes = object.raw.bytes.to_le_bytes().to_vec();
                    bytes.extend(given.to_bytes());
                    offer = Some((given, bytes));
                    made = Some(object);
                }
                Err(error) => warn(&error),
            }
        }
        let continues = made.is_some() || (comm.rank() != 0 && whole.is_some());
        let offered = offer.as_ref().map_or(&[][..], |(_, bytes)| bytes);
        let Some(offers) = self.step(&format!("offer-{at}"), continues, offered)? else {
            return Ok(None);
        };
        // The other ranks take the offer. Each adds its device before any rank binds memory.
        let take = || {
            let (bytes, offer) = offers[0][1..].split_first_chunk::<8>()?;
            let raw = Offer::take(driver, offer, u64::from_le_bytes(*bytes), 0);
            raw.inspect_err(warn).ok().map(hold)
        };
        let taken = made.or_else(take);
        let join = |object: &Multicast| {
            let joined = driver.join_multicast(&object.raw);
            joined.map_err(Error::from).inspect_err(warn)
        };
        let joined = taken.filter(|object| join(object).is_ok());
        if self
            .step(&format!("join-{at}"), joined.is_some(), &[])?
            .is_none()
        {
            return Ok(None);
        }
        drop(offer);
        let bind = |mut object: Multicast, memory: &RawMemory| {
            let address = driver.bind_multicast(&object.raw, memory);
            object.address = address.map_err(Error::from).inspect_err(warn).ok()?;
            Some(object)
        };
        let bound = joined
            .zip(whole)
            .and_then(|(object, memory)| bind(object, &memory));
        if self
            .step(&format!("bind-{at}"), bound.is_some(), &[])?
            .is_none()
        {
            return Ok(None);
        }
        Ok(bound)
    }

    /// Exchanges with all ranks whether this rank continues, and the bytes `more`. Returns one
    /// message per rank, each after a flag byte, or `None` if a rank does not continue. All ranks
    /// must call this together.
    fn step(&self, what: &str, continues: bool, more: &[u8]) -> Result<Option<Vec<Vec<u8>>>> {
        let own = [&[u8::from(continues)], more].concat();
        let messages = self.exchange(what, &own)?;
        let stops = messages
            .iter()
            .position(|message| message.first() != Some(&1));
        if let Some(rank) = stops.filter(|_| continues) {
            tracing::warn!(
                "a window has no multicast address, for rank {rank} cannot take part; its log may \
                    say why"
            );
        }
        Ok(stops.is_none().then_some(messages))
    }
}

/// Logs a step that the driver refuses.
fn warn(error: &Error) {
    tracing::warn!(%error, "a window has no multicast address");
}
