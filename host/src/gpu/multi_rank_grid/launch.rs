//! Launches a grid after all ranks have called [`MultiRankGrid::launch`].

use core::ffi::c_void;
use core::time::Duration;
use std::ffi::CString;
use std::thread;
use std::time::Instant;

use fusewire_device::multi_rank_grid::{GridParams, SUFFIX};

use super::state::{RankLaunch, State};
use super::{MultiRankGrid, SLOT_BYTES, invalid};
use crate::gpu::driver::{LaunchShape, RawEvent, RawFunction};
use crate::{Error, Result};

/// A launch that has passed all checks.
struct PreparedLaunch {
    function: RawFunction,
    shape: LaunchShape,
    /// The parameter structs of all ranks, to be written to the table on the device.
    table: Vec<u8>,
    blocks_per_rank: u32,
}

impl MultiRankGrid {
    /// Launches one grid for the pending launches of all ranks and sets their outcome.
    pub(super) fn launch_grid(&self, state: &mut State) {
        let launches: Vec<RankLaunch> =
            state.launches.iter_mut().filter_map(Option::take).collect();
        let prepared = match self.prepare(state, &launches) {
            Ok(prepared) => prepared,
            Err(error) => return state.finish(Err(error)),
        };
        match self.enqueue(state, &launches, &prepared) {
            Ok(()) => state.finish(Ok(())),
            // Part of the work may already be enqueued, so the `MultiRankGrid` cannot continue.
            Err(error) => state.fail(&error),
        }
    }

    /// Checks the launch and prepares its arguments. Enqueues no work.
    fn prepare(&self, state: &mut State, launches: &[RankLaunch]) -> Result<PreparedLaunch> {
        let Some(first) = launches.first() else {
            return Err(invalid("no rank has launched".to_owned()));
        };
        let function = self.function(state, &first.kernel)?;
        let blocks = self.total_blocks(function, first)?;
        Ok(PreparedLaunch {
            function,
            shape: LaunchShape {
                blocks,
                threads: first.shape.threads,
                shared_bytes: first.shape.shared_bytes,
                cooperative: self.driver.properties().cooperative,
                ..LaunchShape::default()
            },
            table: launches
                .iter()
                .flat_map(|launch| &launch.params)
                .copied()
                .collect(),
            blocks_per_rank: first.shape.blocks,
        })
    }

    /// Looks up the grid form of a kernel and checks the offsets and sizes of its arguments.
    fn function(&self, state: &mut State, kernel: &str) -> Result<RawFunction> {
        if let Some(function) = state.functions.get(kernel) {
            return Ok(*function);
        }
        let symbol = format!("{kernel}{SUFFIX}");
        let name = CString::new(symbol.as_str())
            .map_err(|_| invalid(format!("{kernel:?} is not the name of a kernel")))?;
        let Some(function) = self.driver.function(self.module, &name)? else {
            return Err(Error::launch(format!(
                "the image has no {symbol}; build it with `fusewire-build build --multi-rank-grid`"
            )));
        };
        let expected: Vec<_> = GridParams::FIELDS
            .iter()
            .map(|field| (field.offset, field.size))
            .collect();
        if let Some(found) = self.driver.parameters(function)?
            && found != expected
        {
            return Err(Error::launch(format!(
                "{symbol} takes arguments (offset, size) {found:?}, but a grid form takes \
                 {expected:?}; the image was built by another version"
            )));
        }
        state.functions.insert(kernel.to_owned(), function);
        Ok(function)
    }

    /// Returns the total number of blocks of all ranks. Fails if the blocks do not fit on the GPU
    /// at once.
    fn total_blocks(&self, function: RawFunction, launch: &RankLaunch) -> Result<u32> {
        let LaunchShape {
            blocks,
            threads,
            shared_bytes,
            ..
        } = launch.shape;
        let size = self.options.size;
        let each = self
            .driver
            .resident_blocks(function, threads, shared_bytes)?;
        let multiprocessors = self.driver.properties().multiprocessors;
        let most = u64::from(each) * u64::from(multiprocessors);
        match size.checked_mul(blocks) {
            Some(all) if u64::from(all) <= most => Ok(all),
            _ => Err(Error::launch(format!(
                "{}: {blocks} blocks of each of {size} ranks are not resident together: \
                 {multiprocessors} multiprocessors hold {each} blocks of {threads} threads each; \
                 use fewer blocks, threads or ranks",
                launch.kernel
            ))),
        }
    }

    fn enqueue(
        &self,
        state: &mut State,
        launches: &[RankLaunch],
        prepared: &PreparedLaunch,
    ) -> Result<()> {
        let slot = state.next_slot;
        state.next_slot = (slot + 1) % state.slots.len();
        let ended = state.slots[slot];
        self.wait_complete(ended)?;
        let slot_bytes = u64::from(self.options.size) * SLOT_BYTES;
        let mut address = self.table.address + slot as u64 * slot_bytes;
        // SAFETY: the slot lies in the table, because `slot` is less than the number of slots, and
        // the structs of all ranks take at most `size * SLOT_BYTES` bytes. The previous grid that
        // read this slot is complete (`wait_complete` above).
        unsafe { self.driver.write(address, &prepared.table) }?;
        for (launch, &event) in launches.iter().zip(&state.before) {
            self.driver.record_event(event, launch.stream)?;
            self.driver.wait_event(self.stream, event)?;
        }
        let mut blocks_per_rank = prepared.blocks_per_rank;
        let mut arguments = [
            (&raw mut address).cast::<c_void>(),
            (&raw mut blocks_per_rank).cast::<c_void>(),
        ];
        // SAFETY: the method `function` has checked that the grid form takes these arguments. The
        // table contains one parameter struct per rank, and each caller of `launch` guarantees that
        // the struct of its rank fulfils the requirements of the kernel.
        unsafe {
            self.driver.launch(
                prepared.function,
                &prepared.shape,
                &mut arguments,
                self.stream,
            )
        }?;
        self.driver.record_event(ended, self.stream)?;
        for launch in launches {
            self.driver.wait_event(launch.stream, ended)?;
        }
        Ok(())
    }

    /// Blocks until `event`, which was recorded after a grid, is complete. Fails if the grid takes
    /// longer than the timeout.
    fn wait_complete(&self, event: RawEvent) -> Result<()> {
        let deadline = Instant::now() + self.options.timeout;
        while !self.driver.query_event(event)? {
            if Instant::now() >= deadline {
                return Err(Error::launch(format!(
                    "{} grids are enqueued, and the first of them has not ended within {} s; a \
                     kernel before it on a rank's stream has not ended either, or hangs",
                    self.options.slots,
                    self.options.timeout.as_secs_f64()
                )));
            }
            thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }
}
