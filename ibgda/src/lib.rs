//! mlx5 work queue entries, doorbells and completions, as plain data over three memory primitives.
//!
//! An empty crate for now: it stands at the end of the arrows (`device-api -> ibgda`), depends on
//! nothing, and will hold what a GPU needs to drive an RDMA NIC by itself (IBGDA).
#![no_std]
