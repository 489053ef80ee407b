//! Configuration of a communicator. New versions of the library append members to the C struct, and
//! the struct stores its own size. One Rust struct therefore serves every version: `size` is the
//! number of bytes that the library may read.

use core::ffi::{c_char, c_int, c_uint};
use core::mem::offset_of;

use crate::version::Version;

/// Value of a member that is not set.
pub const NCCL_CONFIG_UNDEF_INT: c_int = c_int::MIN;
/// Magic number of an initialised configuration.
pub const NCCL_API_MAGIC: c_uint = 0xcafe_beef;

macro_rules! config {
    ($($field:ident: $ty:ty = $init:expr, $offset:literal;)*) => {
        /// `ncclConfig_t` with the layout of 2.31 and 2.32 (`ncclConfig_v23100`).
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        pub struct ncclConfig_t {
            /// Number of bytes of the struct that the library may read.
            pub size: usize,
            /// [`NCCL_API_MAGIC`].
            pub magic: c_uint,
            /// Version of the layout.
            pub version: c_uint,
            $(#[doc = concat!("`", stringify!($field), "` of `nccl.h`.")] pub $field: $ty,)*
        }

        const _: () = {
            assert!(offset_of!(ncclConfig_t, magic) == 8);
            assert!(offset_of!(ncclConfig_t, version) == 12);
            $(assert!(offset_of!(ncclConfig_t, $field) == $offset);)*
            assert!(size_of::<ncclConfig_t>() == 120);
        };

        impl ncclConfig_t {
            /// Creates a configuration with no member set, in the newest layout that `library`
            /// knows: the layout of 2.31, 2.27 or 2.18.
            pub const fn new(library: Version) -> Self {
                let (size, version) = Self::layout(library);
                Self { size, magic: NCCL_API_MAGIC, version, $($field: $init,)* }
            }
        }
    };
}

config! {
    blocking: c_int = NCCL_CONFIG_UNDEF_INT, 16;
    cgaClusterSize: c_int = NCCL_CONFIG_UNDEF_INT, 20;
    minCTAs: c_int = NCCL_CONFIG_UNDEF_INT, 24;
    maxCTAs: c_int = NCCL_CONFIG_UNDEF_INT, 28;
    netName: *const c_char = core::ptr::null(), 32;
    splitShare: c_int = NCCL_CONFIG_UNDEF_INT, 40;
    trafficClass: c_int = NCCL_CONFIG_UNDEF_INT, 44;
    commName: *const c_char = core::ptr::null(), 48;
    collnetEnable: c_int = NCCL_CONFIG_UNDEF_INT, 56;
    CTAPolicy: c_int = NCCL_CONFIG_UNDEF_INT, 60;
    shrinkShare: c_int = NCCL_CONFIG_UNDEF_INT, 64;
    nvlsCTAs: c_int = NCCL_CONFIG_UNDEF_INT, 68;
    nChannelsPerNetPeer: c_int = NCCL_CONFIG_UNDEF_INT, 72;
    nvlinkCentricSched: c_int = NCCL_CONFIG_UNDEF_INT, 76;
    graphUsageMode: c_int = NCCL_CONFIG_UNDEF_INT, 80;
    numRmaCtx: c_int = NCCL_CONFIG_UNDEF_INT, 84;
    maxP2pPeers: c_int = NCCL_CONFIG_UNDEF_INT, 88;
    graphStreamOrdering: c_int = NCCL_CONFIG_UNDEF_INT, 92;
    launchOrderImplicit: c_int = NCCL_CONFIG_UNDEF_INT, 96;
    numRmaSig: c_int = NCCL_CONFIG_UNDEF_INT, 100;
    rmaEagerInit: c_int = NCCL_CONFIG_UNDEF_INT, 104;
    hostCftMode: c_int = NCCL_CONFIG_UNDEF_INT, 108;
    nvlsHostMode: c_int = NCCL_CONFIG_UNDEF_INT, 112;
}

impl ncclConfig_t {
    const fn layout(library: Version) -> (usize, c_uint) {
        match library.code() {
            23_100.. => (size_of::<Self>(), 23_100),
            22_700.. => (72, 22_700),
            _ => (48, 21_800),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_follows_the_library() {
        for (code, size, version) in [
            (21_805, 48, 21_800),
            (22_699, 48, 21_800),
            (22_703, 72, 22_700),
            (23_203, 120, 23_100),
        ] {
            let config = ncclConfig_t::new(Version::new(code));
            assert_eq!((config.size, config.version), (size, version), "{code}");
            assert_eq!(config.magic, 0xcafe_beef);
            assert_eq!(config.blocking, i32::MIN);
        }
    }
}
