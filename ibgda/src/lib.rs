//! Reserved for IBGDA: the mlx5 work queue entries, doorbells and completions with which a GPU
//! drives an RDMA NIC without the CPU.
//!
//! The crate is empty for now. `fusewire-device` depends on it; it has no dependencies.
#![no_std]
