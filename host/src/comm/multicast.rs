//! Multicast addresses of windows: one store reaches every rank's part, in the NVLink switch.
//!
//! All ranks take part in every step, and tell each other in the store how it went: a rank that cannot go on leaves all
//! of them without a multicast address, and the window is as any other.

use core::fmt;
use std::sync::Arc;

use super::Communicator;
use crate::Result;
use crate::gpu::driver::{RawMemory, RawMulticast};
use crate::gpu::{Gpu, Offer};
use crate::memory::Memory;

/// A multicast object that this rank has a part in.
pub(super) struct Multicast {
    gpu: Arc<Gpu>,
    raw: RawMulticast,
    address: u64,
}

impl fmt::Debug for Multicast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Multicast")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl Multicast {
    /// Where stores reach all ranks.
    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Multicast {
    fn drop(&mut self) {
        // SAFETY: the window has ended on all ranks, or the object was never used.
        let released = unsafe { self.gpu.driver().release_multicast(self.raw, self.address) };
        if let Err(error) = released {
            tracing::warn!(%error, "a multicast object could not be freed");
        }
    }
}

impl Communicator {
    /// A multicast object over every rank's `memory`, which begins at its beginning (`offset` 0), where the switch and all
    /// ranks have one. All ranks together.
    ///
    /// # Errors
    /// Those of the store: what a driver refuses is no error.
    pub(super) fn multicast(&self, memory: &Memory, offset: u64) -> Result<Option<Multicast>> {
        let Some(on_gpu) = &self.inner.on_gpu else {
            return Ok(None);
        };
        let gpu = on_gpu.gpu();
        let whole = memory.whole().filter(|_| offset == 0);
        let able = gpu.properties().multicast && self.size() > 1 && whole.is_some();
        let mut card = gpu.properties().uuid.to_vec();
        card.push(u8::from(able));
        let cards = self.exchange("multicast", &card)?;
        let one_each = (1..cards.len()).all(|rank| !cards[..rank].contains(&cards[rank]));
        let all_able = cards.iter().all(|card| card.last() == Some(&1));
        let (Some(whole), true) = (whole, one_each && all_able) else {
            return Ok(None);
        };
        self.make_multicast(gpu, &whole)
    }

    fn make_multicast(&self, gpu: &Arc<Gpu>, memory: &RawMemory) -> Result<Option<Multicast>> {
        let driver = gpu.driver();
        let hold = |raw: RawMulticast| Multicast {
            gpu: Arc::clone(gpu),
            raw,
            address: 0,
        };
        // Rank 0 makes the object and offers it.
        let mut made = None;
        let mut offer = None;
        if self.rank() == 0 {
            let object = driver
                .create_multicast(memory.bytes, self.size())
                .map(&hold);
            match object.and_then(|object| {
                let export = driver.export_multicast(&object.raw)?;
                Ok((Offer::new(export)?, object))
            }) {
                Ok((given, object)) => {
                    let mut bytes = object.raw.bytes.to_le_bytes().to_vec();
                    bytes.extend(given.to_bytes());
                    offer = Some((given, bytes));
                    made = Some(object);
                }
                Err(error) => tracing::warn!(%error, "a window has no multicast address"),
            }
        }
        let own = offer.as_ref().map_or(&[][..], |(_, bytes)| bytes);
        let offers = self.exchange("multicast", own)?;
        // The others take it; each adds its device, before any binds memory.
        let taken = made.map_or_else(
            || {
                let (bytes, offer) = offers[0].split_first_chunk::<8>()?;
                let raw = Offer::take(driver, offer, u64::from_le_bytes(*bytes), 0);
                raw.inspect_err(|error| tracing::warn!(%error, "no multicast address"))
                    .ok()
                    .map(&hold)
            },
            Some,
        );
        let joined = taken.filter(|object| self.told(driver.join_multicast(&object.raw)));
        if !self.all("multicast", joined.is_some())? {
            return Ok(None);
        }
        drop(offer);
        let bound = joined.and_then(|mut object| {
            let bound = driver.bind_multicast(&object.raw, memory);
            object.address = *bound.as_ref().unwrap_or(&0);
            self.told(bound.map(drop)).then_some(object)
        });
        if !self.all("multicast", bound.is_some())? {
            return Ok(None);
        }
        Ok(bound)
    }

    /// Whether a step went well; warns where it did not.
    fn told(&self, step: Result<()>) -> bool {
        if let Err(error) = &step {
            tracing::warn!(%error, "a window has no multicast address");
        }
        step.is_ok()
    }

    /// Whether `own` holds on all ranks. All ranks together.
    fn all(&self, what: &str, own: bool) -> Result<bool> {
        let words = self.exchange(what, &[u8::from(own)])?;
        Ok(words.iter().all(|word| word == &[1]))
    }
}
