//! A process that has searched for the driver cannot replace it. The search is permanent for the
//! process, so the test has a program of its own.

use fusewire_cuda_fake::{Settings, install};

#[test]
fn a_driver_that_was_searched_for_cannot_be_replaced() {
    let found = fusewire::cuda::devices();
    let error = install(&Settings::default()).unwrap_err().to_string();
    assert!(
        error.contains("install the fake before the first use of a CUDA device"),
        "{error}"
    );
    // The call has no effect on the devices.
    assert_eq!(found.is_ok(), fusewire::cuda::devices().is_ok());
}
