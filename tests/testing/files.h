// What tests of files need.
//
// SPDX-License-Identifier: Apache-2.0

#ifndef VARLANE_TESTS_TESTING_FILES_H_
#define VARLANE_TESTS_TESTING_FILES_H_

#include <string>
#include <vector>

namespace varlane::testing {

// A folder of its own that is removed with all in it.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  std::vector<std::string> names() const;  // of the files in it, sorted

 private:
  std::string path_;
};

std::string ReadWholeFile(const std::string& path);
// With the folders it is in.
void WriteWholeFile(const std::string& path, const std::string& contents);

}  // namespace varlane::testing

#endif  // VARLANE_TESTS_TESTING_FILES_H_
