//! Check that kernels of each rank have atomics for the cells in the memory of the other ranks.

use crate::Result;
use crate::comm::Communicator;
use crate::comm::submit::invalid;
use crate::gpu::Gpu;

/// Reason why a rank cannot update the cells of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    /// The driver reports no native atomics between the two GPUs.
    NoAtomics = 1,
    /// The process does not see the peer's GPU, so the driver cannot say.
    NotVisible = 2,
    /// The driver returned an error.
    DriverError = 3,
}

impl Refusal {
    /// Returns the refusal with this code.
    fn from_code(code: u64) -> Self {
        match code {
            1 => Self::NoAtomics,
            2 => Self::NotVisible,
            _ => Self::DriverError,
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::NoAtomics => "the driver reports no native atomics between their GPUs",
            Self::NotVisible => {
                "its process does not see the GPU of that rank, so that it cannot ask the driver; \
                 let each process see all GPUs of the job (CUDA_VISIBLE_DEVICES, \
                 HIP_VISIBLE_DEVICES)"
            }
            Self::DriverError => "the driver returned an error, which that rank reports",
        }
    }
}

impl Communicator {
    /// Checks that the kernels of every rank can update cells of every rank natively. All ranks
    /// must call this together; all of them fail if one of them refuses.
    ///
    /// On the CPU no rank refuses, because kernels update cells natively or through the proxies of
    /// a network.
    pub(super) fn check_atomics(&self) -> Result<()> {
        let Some(on_gpu) = &self.inner.executor.on_gpu else {
            return Ok(());
        };
        let gpu = on_gpu.gpu();
        let own = gpu.properties().uuid;
        let uuids = self.agree("cells", halves(own), &[], |_| String::new())?;
        if uuids.iter().all(|uuid| *uuid == uuids[0]) {
            // All ranks share one GPU, and all of them reach this result.
            return Ok(());
        }
        let others = uuids.iter().zip(0u32..);
        let found = others
            .filter(|(uuid, _)| **uuid != halves(own))
            .map(|(uuid, peer)| (refusal(gpu, *uuid), peer))
            .find(|(refusal, _)| !matches!(refusal, Ok(None)));
        let (word, error) = match found {
            None => (0, None),
            Some((Ok(refusal), peer)) => {
                let refusal = refusal.unwrap_or(Refusal::NoAtomics);
                (word(refusal, peer), None)
            }
            Some((Err(error), peer)) => (word(Refusal::DriverError, peer), Some(error)),
        };
        let words = self.agree("cells", [word], &[], |_| String::new())?;
        if let Some(error) = error {
            return Err(error);
        }
        let refused = words.iter().zip(0u32..).find(|([word], _)| *word != 0);
        let Some(([word], rank)) = refused else {
            return Ok(());
        };
        let (refusal, peer) = (Refusal::from_code(word >> 32), *word as u32);
        Err(invalid(
            "new_window",
            format!(
                "a window with cells: rank {rank} cannot update cells of rank {peer}: {}",
                refusal.text()
            ),
        ))
    }
}

/// Returns the reason for which kernels of `gpu` cannot update cells in the memory of another GPU,
/// or `None` if they can.
fn refusal(gpu: &Gpu, [low, high]: [u64; 2]) -> Result<Option<Refusal>> {
    let uuid = u128::from(high) << 64 | u128::from(low);
    Ok(match gpu.driver().native_atomics(&uuid.to_le_bytes())? {
        Some(true) => None,
        Some(false) => Some(Refusal::NoAtomics),
        None => Some(Refusal::NotVisible),
    })
}

/// Returns a refusal as a word that is not 0.
fn word(refusal: Refusal, peer: u32) -> u64 {
    (refusal as u64) << 32 | u64::from(peer)
}

/// Returns the identifier of a GPU as two words.
fn halves(uuid: [u8; 16]) -> [u64; 2] {
    let uuid = u128::from_le_bytes(uuid);
    [uuid as u64, (uuid >> 64) as u64]
}
