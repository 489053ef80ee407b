//! Tests windows with cells on several GPUs: the host asks the driver for native atomics.

use fusewire::{Communicator, DType, Result, Window, WindowOptions};

use super::multicast::run_each;
use super::on_fake;

const DEVICES: (&str, &str) = ("FUSEWIRE_CUDA_FAKE_DEVICES", "3");

fn window(comm: &Communicator, cells: u32) -> Result<Window> {
    let mut options = WindowOptions::default();
    options.cells = cells;
    comm.alloc_window(DType::U8, 8, options)
}

#[test]
fn gpus_with_native_atomics_have_cells() {
    let test = "cells::gpus_with_native_atomics_have_cells";
    on_fake(test, &[DEVICES], || {
        run_each(3, |comm| {
            window(&comm, 4)?.free()?;
            comm.finalize()
        });
    });
}

#[test]
fn gpus_without_native_atomics_are_refused_on_all_ranks() {
    let test = "cells::gpus_without_native_atomics_are_refused_on_all_ranks";
    let without = ("FUSEWIRE_CUDA_FAKE_ATOMICS", "0");
    on_fake(test, &[DEVICES, without], || {
        run_each(3, |comm| {
            let error = window(&comm, 4).expect_err("no atomics").to_string();
            let text = "new_window: a window with cells: rank 0 cannot update cells of rank 1: the \
                        driver reports no native atomics between their GPUs";
            assert_eq!(error, text);
            // The communicator has not failed, and windows without cells need no atomics.
            window(&comm, 0)?.free()?;
            comm.finalize()
        });
    });
}
