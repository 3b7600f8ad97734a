// Timestamps as traces write them.
//
// Source of the calendar: Hinnant, chrono-compatible low-level date algorithms.
// SPDX-License-Identifier: Apache-2.0

#include "tools/timestamp.h"

#include <fmt/format.h>

namespace varlane::tools {
namespace {

bool IsLeapYear(int64_t year) {
  return (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
}

// Days since 1970-01-01 of a date in the Gregorian calendar.
int64_t DaysFromCivil(int64_t year, int64_t month, int64_t day) {
  year -= month <= 2 ? 1 : 0;
  const int64_t era = year / 400;
  const int64_t year_of_era = year - era * 400;
  const int64_t day_of_year =
      (153 * (month + (month > 2 ? -3 : 9)) + 2) / 5 + day - 1;
  const int64_t day_of_era =
      year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
  return era * 146097 + day_of_era - 719468;
}

// Takes `digits` decimal digits and the character after them, if one is wanted.
std::optional<int64_t> TakeDigits(std::string_view* text, size_t digits,
                                  char after) {
  if (text->size() < digits) return std::nullopt;
  int64_t value = 0;
  for (size_t i = 0; i < digits; ++i) {
    const char c = (*text)[i];
    if (c < '0' || c > '9') return std::nullopt;
    value = value * 10 + (c - '0');
  }
  text->remove_prefix(digits);
  if (after == '\0') return value;
  if (text->empty() || text->front() != after) return std::nullopt;
  text->remove_prefix(1);
  return value;
}

// ".6805900" as nanoseconds: up to nine digits, taken off `text`.
std::optional<int64_t> TakeFraction(std::string_view* text) {
  if (text->empty() || text->front() != '.') return 0;
  text->remove_prefix(1);
  int64_t value = 0;
  int digits = 0;
  for (; !text->empty() && text->front() >= '0' && text->front() <= '9';
       ++digits) {
    if (digits == 9) return std::nullopt;
    value = value * 10 + (text->front() - '0');
    text->remove_prefix(1);
  }
  if (digits == 0) return std::nullopt;
  for (; digits < 9; ++digits) value *= 10;
  return value;
}

struct Civil {
  int64_t year, month, day;
};

// The inverse of DaysFromCivil.
Civil CivilFromDays(int64_t days) {
  days += 719468;
  const int64_t era = days / 146097;
  const int64_t doe = days - era * 146097;
  const int64_t yoe = (doe - doe / 1460 + doe / 36524 - doe / 146096) / 365;
  const int64_t doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
  const int64_t shifted = (5 * doy + 2) / 153;
  const int64_t month = shifted < 10 ? shifted + 3 : shifted - 9;
  return {yoe + era * 400 + (month <= 2 ? 1 : 0), month,
          doy - (153 * shifted + 2) / 5 + 1};
}

}  // namespace

std::optional<int64_t> ParseTimestampNs(std::string_view text) {
  const auto year = TakeDigits(&text, 4, '-');
  const auto month = TakeDigits(&text, 2, '-');
  const bool has_t = text.size() > 2 && text[2] == 'T';
  const auto day = TakeDigits(&text, 2, has_t ? 'T' : ' ');
  const auto hour = TakeDigits(&text, 2, ':');
  const auto minute = TakeDigits(&text, 2, ':');
  const auto second = TakeDigits(&text, 2, '\0');
  if (!year || !month || !day || !hour || !minute || !second) return {};
  const auto fraction = TakeFraction(&text);
  if (!fraction) return std::nullopt;
  if (!text.empty() && text != "+00:00" && text != "Z") return std::nullopt;
  static constexpr int kDays[] = {31, 28, 31, 30, 31, 30,
                                  31, 31, 30, 31, 30, 31};
  if (*year < 1970 || *year > 2200 || *month < 1 || *month > 12) return {};
  const int64_t days =
      kDays[*month - 1] + (*month == 2 && IsLeapYear(*year) ? 1 : 0);
  if (*day < 1 || *day > days) return std::nullopt;
  if (*hour > 23 || *minute > 59 || *second > 60) return std::nullopt;
  const int64_t seconds = DaysFromCivil(*year, *month, *day) * 86400 +
                          *hour * 3600 + *minute * 60 + *second;
  return seconds * 1000000000 + *fraction;
}

std::string FormatTimestamp(int64_t ns) {
  const int64_t ticks = ns / 100;
  const int64_t seconds = ticks / 10000000;
  const Civil date = CivilFromDays(seconds / 86400);
  const int64_t second = seconds % 86400;
  return fmt::format("{:04}-{:02}-{:02} {:02}:{:02}:{:02}.{:07}", date.year,
                     date.month, date.day, second / 3600, second / 60 % 60,
                     second % 60, ticks % 10000000);
}

}  // namespace varlane::tools
