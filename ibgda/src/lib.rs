//! Reserved for IBGDA: the mlx5 work queue entries, doorbells and completions with which a GPU
//! drives an RDMA NIC without the CPU.
//!
//! The crate is empty for now and has no dependencies. `fusewire-device` already depends on it, so
//! that no dependency between the crates changes when the code is added.
#![no_std]
