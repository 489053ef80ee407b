//! Shape of a user kernel's launch.

use crate::gpu::{Gpu, Kernel};
use crate::{Error, Result};

/// Portable maximum cluster size: the number of blocks that every GPU with clusters supports.
/// Larger clusters need a kernel attribute, and not every GPU supports them.
const MOST_OF_CLUSTER: u32 = 8;
/// First compute capability with clusters.
const CLUSTERS_SINCE: u32 = 90;

/// Shape of a user kernel's launch. A value of zero selects the communicator's default.
///
/// On the CPU a block has the communicator's lanes (`TestOptions::lanes`) and
/// [`SHARED_BYTES`](fusewire_device::arch::SHARED_BYTES) bytes of shared memory, all blocks run
/// concurrently, and a kernel begins when the previous one has ended. So only `blocks` has an
/// effect, `cluster` is checked as on a GPU, and the other attributes are ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaunchAttributes {
    /// Number of blocks.
    pub blocks: u32,
    /// Threads per block (GPUs).
    pub threads: u32,
    /// Bytes of dynamic shared memory per block (GPUs).
    pub shared_bytes: u32,
    /// Blocks per cluster (NVIDIA, sm_90 and later): 1 to 8, a divisor of `blocks`.
    pub cluster: u32,
    /// Requires that all blocks are resident together; otherwise the launch is refused (GPUs).
    pub cooperative: bool,
    /// Lets the kernel begin before the previous kernel on the stream has ended: programmatic
    /// dependent launch (NVIDIA, sm_90 and later; otherwise an ordinary launch).
    pub dependent: bool,
}

impl LaunchAttributes {
    /// Refuses clusters that no device supports. `blocks` is the final number of blocks of the
    /// launch.
    pub(super) fn check(&self, kernel: &str, blocks: u32) -> Result<()> {
        if self.cluster > MOST_OF_CLUSTER {
            return Err(Error::launch(format!(
                "kernel {kernel}: clusters of {} blocks, {MOST_OF_CLUSTER} at most",
                self.cluster
            )));
        }
        if self.cluster > 0 && !blocks.is_multiple_of(self.cluster) {
            return Err(Error::launch(format!(
                "kernel {kernel}: {blocks} blocks cannot be put into clusters of {}: the cluster \
                    is to divide the blocks",
                self.cluster
            )));
        }
        Ok(())
    }

    /// Refuses a shape that the GPU would refuse, before the communicator's state changes. A launch
    /// that fails later fails the communicator, because other ranks may wait for it.
    pub(super) fn check_on(
        &self,
        gpu: &Gpu,
        kernel: &Kernel,
        blocks: u32,
        threads: u32,
    ) -> Result<()> {
        let (name, properties) = (kernel.name, gpu.properties());
        let refused = |detail: String| {
            Err(Error::launch(format!(
                "kernel {name} on {} ({}, {}): {detail}",
                gpu.device(),
                properties.name,
                properties.architecture
            )))
        };
        if self.cluster > 0 && !has_clusters(&properties.architecture) {
            return refused(format!(
                "clusters of {} blocks were asked for, which there are on NVIDIA GPUs from sm_90 \
                    on; leave `cluster` 0",
                self.cluster
            ));
        }
        let most = properties
            .shared_bytes
            .saturating_sub(kernel.properties.shared_bytes);
        if self.shared_bytes > most {
            return refused(format!(
                "{} bytes of dynamic shared memory were asked for; beside its own {} bytes a block \
                    has {most}",
                self.shared_bytes, kernel.properties.shared_bytes
            ));
        }
        if !self.cooperative {
            return Ok(());
        }
        if !properties.cooperative {
            return refused("the device has no cooperative launches".to_owned());
        }
        let driver = gpu.driver();
        let each = driver.resident_blocks(kernel.raw, threads, self.shared_bytes)?;
        let fits = u64::from(each) * u64::from(properties.multiprocessors);
        if u64::from(blocks) > fits {
            return refused(format!(
                "a cooperative launch of {blocks} blocks of {threads} threads, where {fits} are \
                 resident together; use fewer blocks or threads"
            ));
        }
        Ok(())
    }
}

/// Returns true if a GPU of this architecture (such as `sm_90`) has clusters.
fn has_clusters(architecture: &str) -> bool {
    let number = architecture
        .strip_prefix("sm_")
        .and_then(|text| text.parse::<u32>().ok());
    number.is_some_and(|number| number >= CLUSTERS_SINCE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_divides_the_blocks() {
        let of = |cluster| LaunchAttributes {
            cluster,
            ..LaunchAttributes::default()
        };
        for (cluster, blocks) in [(0, 7), (1, 7), (2, 8), (8, 8), (3, 9)] {
            of(cluster).check("k", blocks).unwrap();
        }
        for (cluster, blocks, says) in [
            (2, 7, "7 blocks cannot be put into clusters of 2"),
            (8, 4, "4 blocks cannot be put into clusters of 8"),
            (9, 9, "clusters of 9 blocks, 8 at most"),
        ] {
            let error = of(cluster).check("k", blocks).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn clusters_since_hopper() {
        let has = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"].map(has_clusters);
        assert_eq!(has, [false, false, true, true, true, false]);
    }
}
