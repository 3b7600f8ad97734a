// VARLANE_EXPORT marks what the shared library shows; all else is hidden.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_EXPORT_H_
#define VARLANE_EXPORT_H_

#if defined(__GNUC__) || defined(__clang__)
#define VARLANE_EXPORT [[gnu::visibility("default")]]
#else
#define VARLANE_EXPORT
#endif

#endif  // VARLANE_EXPORT_H_
