//! Layout and initial contents of a workspace.

use fusewire_device::layout::{
    BLOCKS_AT, BlockState, CommState, LAYOUT_VERSION, LINE, Progress, STATE_MAGIC, WorkspaceConfig,
    WorkspaceLayout,
};

use crate::Result;
use crate::memory::Memory;
use crate::options::Options;

/// Returns the layout of a rank of `size`, in teams of `team` ranks.
pub(in crate::comm) fn layout(size: u32, team: u32, options: &Options) -> WorkspaceLayout {
    WorkspaceLayout::new(&WorkspaceConfig {
        size,
        team,
        max_blocks: options.large_blocks,
        blocks: options.blocks,
        packet_slot: options.packet_slot(size),
        channel_slot: options.channel_slot_bytes,
        channel_depth: options.channel_depth,
        staging: options.staging_bytes,
    })
}

pub(super) fn write_state(
    workspace: &Memory,
    layout: &WorkspaceLayout,
    options: &Options,
    generation: u64,
) -> Result<()> {
    let mut state: CommState = bytemuck::Zeroable::zeroed();
    state.magic = STATE_MAGIC;
    state.version = LAYOUT_VERSION;
    state.bytes = size_of::<CommState>() as u32;
    state.generation = generation;
    // SAFETY: no other rank and no kernel accesses the new workspace yet.
    unsafe { workspace.write(0, bytemuck::bytes_of(&state))? };
    let mut block_state: BlockState = bytemuck::Zeroable::zeroed();
    block_state.sequence = options.testing.first_epoch;
    block_state.rounds = options.testing.first_epoch;
    block_state.packet_epoch = options.testing.first_epoch;
    block_state.busy = BlockState::idle(
        block_state.sequence,
        block_state.rounds,
        block_state.packet_epoch,
    );
    // No operation has been called, but peers compare the sequence number.
    let mut progress: Progress = bytemuck::Zeroable::zeroed();
    progress.call = options.testing.first_epoch << 40;
    progress.count = options.testing.first_epoch << 48;
    progress.step = options.testing.first_epoch << 40;
    for block in 0..u64::from(options.large_blocks) {
        // SAFETY: no other rank and no kernel accesses the new workspace yet.
        unsafe {
            workspace.write(BLOCKS_AT + block * LINE, bytemuck::bytes_of(&block_state))?;
            workspace.write(
                layout.progress + block * LINE,
                bytemuck::bytes_of(&progress),
            )?;
        }
    }
    Ok(())
}
